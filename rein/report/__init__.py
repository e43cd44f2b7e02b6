"""What people look at afterwards: one self-contained page. Knows no stage; what it shows is handed to it."""
