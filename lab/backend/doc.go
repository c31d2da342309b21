// Package backend runs the nodes and cables of a lab's fabric: daemons in this process, or processes in network
// namespaces, or containers. It implements them by three interfaces: Lifecycle, Faults and Observer. Calls on one
// fabric are sequential, except API and Light, which may run at any time after Build.
//
// A backend receives states as arguments and reports the states that it reads. It does not know which of them are
// correct.
package backend
