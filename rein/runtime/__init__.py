"""How a run sits on the machine: processes, optimizer steps, seeds, signals. Applied from outside the models."""
