"""Programs that nobody vouches for, run where they can do no harm: what happens inside the process.

Imports the standard library only, so that it starts in milliseconds. What starts the process, and what it
is for, is rewards/'s.
"""
