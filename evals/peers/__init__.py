"""The programs that a user would run instead of the engine, on the same weights, tokens and memory.

    workload.py       which documents every program decodes
    memory.py         a memory limit around a program, page cache included
    llama_cpp.py      stock llama.cpp from the package index: built, and given the model in its own format
    worker.py         the Python programs: the engine, stock transformers, accelerate
    runs.py           one program run and what it took, as a record
    tables.py         records as tables

A program is asked for tokens one at a time and prints a line a token; `llama_decode.c` and worker.py speak the same
lines, so that nothing but the program differs.
"""
