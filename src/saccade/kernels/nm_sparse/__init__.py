"""N:M sparse attention: of each M consecutive scores of a query the N largest are kept. See README.md here."""
