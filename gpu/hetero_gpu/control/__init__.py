"""What host and device tell each other while a graph runs, through mapped host memory."""
