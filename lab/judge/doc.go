// Package judge decides which state of a fabric is correct: the model computes from the state of the cables, with a few
// lines of arithmetic, which weights every pair of source groups must have, and the checks compare these with the
// reported weights, routes and links. It has no sockets, no goroutines and no backend, so that a lab can confirm a
// state only by reading it.
package judge
