"""The code domain: helpers and a main write one program, which is scored by the task's tests."""
