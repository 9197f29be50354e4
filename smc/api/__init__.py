"""What a caller says and gets: sampling parameters, requests, outputs, and the limits that all parts share. Imports no
torch."""
