"""What is known of stored rows before a weight moves: their own facts, what a model says, a verdict."""
