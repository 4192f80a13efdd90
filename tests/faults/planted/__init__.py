"""Clusters with one bug each, to see that the suite finds it. `start.py` starts them.

A bug is a module that stands in for the one of a child process: it patches one function of it and runs it. Nothing in
the code that ships knows of this.
"""
