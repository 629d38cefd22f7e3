"""The code domain: helpers and a main write one program; their tests say what it is worth."""
