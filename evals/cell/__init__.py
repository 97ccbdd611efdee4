"""What runs inside the sandbox, in a Python of its own with the standard library alone; evals/trial.py starts it.

inside      the process that is started: it makes the cell, starts the code in it, ends it at a limit on time
namespaces  the cell: what the code sees and may do
syscalls    the calls to the kernel that the code may make
roles       the two programs that run in cells of their own: the completion, and the test that asks it
values      what the two may say to each other
"""
