// Package guard stands between a leaf, which is not trusted, and the embedded
// BGP speaker, which one malformed packet could end. It knows octets only: no
// sockets, no goroutines, no clock, no BGP library.
package guard
