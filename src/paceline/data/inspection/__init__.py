"""`paceline inspect`: what a data set holds, and whether it is whole."""
