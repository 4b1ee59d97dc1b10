"""`attention`: exact softmax attention."""
