"""The core: from a configuration to a gradient, in rooms whose order is the pipeline's.

Each room imports those before it: types, keyed, files, config, builtin, tasks, processes, models,
credit, rollout, update, preferences, evaluation, loop. Nothing here imports another package of
the project.
"""
