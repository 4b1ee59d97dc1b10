"""Tools that the checks of all operations share: cases, inputs, the error budget, timing, and compiling ahead of time.

The named problems of an operation and their check are in its own folder, `<operation>/testing/`.
"""
