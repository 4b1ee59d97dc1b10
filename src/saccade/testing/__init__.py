"""What the checks of all operations share: cases, inputs, the budget, timing, and compiling ahead of time.

The named problems of an operation and their check lie in its own folder, `<operation>/testing/`.
"""
