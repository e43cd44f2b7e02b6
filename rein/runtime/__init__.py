"""How a run sits on the machine: processes, optimizer, seeds, signals; applied from outside the models.

torchrun says what started this process, launch starts and ends the others, ranks lets one lead them, and fsdp
cuts models over them; single is one process.
"""
