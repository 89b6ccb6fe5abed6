"""The embedded default job: a very small Llama (base/) and a task that it has never seen (task/), made by
scripts/make_base.py.
"""
