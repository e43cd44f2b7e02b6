"""Verbs that look, prepare or show, one file each; the only place beside stages/ that composes."""
