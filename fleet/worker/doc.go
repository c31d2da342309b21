// Package worker joins the reports of a fabric's nodes (package report), and names the parts at fault (package
// topo/locate). A worker stores nothing: nodes repeat their states at each connection, and workers follow each other,
// so that each has the whole view and answers every question.
//
// A state is kept for grace after its stream has ended, so that a node that moves to another worker is not missed
// meanwhile. Of two states of a node the one of the later connection holds, whatever the order of their arrival.
package worker
