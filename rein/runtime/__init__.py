"""How a run sits on the machine: processes, optimizer, seeds, signals; applied from outside the models."""
