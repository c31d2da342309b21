// Package page serves a live page over HTTP: the planes, sub-ports, sessions and weights of a daemon, and a timeline of
// its events.
//
// The page reads fare.v1 alone (Source). A node of the page follows its source while a browser is connected, once for
// all browsers, and costs nothing otherwise. The model applies answers and messages, and returns tables of rows in
// JSON; it has no clock, goroutine or lock. A stream of server-sent events compares the tables with those that its
// browser has, and carries the changed rows alone. A browser shows a section of the destinations, which it names in the
// stream's address, so the traffic does not depend on the number of destinations.
//
// The server has no request that changes anything, listens on loopback addresses alone, and rejects requests whose Host
// is a name other than localhost: a foreign page that rebinds its name to this machine (DNS rebinding) reads nothing.
// All assets are embedded; the Content Security Policy forbids any other source.
package page
