// Package lab is a whole fabric in one process: leaves and GPU servers with real BGP sessions on 127.0.0.0/8, in-memory
// data planes, and cables that can be cut. It needs no root.
//
// A scenario is a text of steps. After each step every pair of GPUs in the fabric must have exactly the weights that an
// independent, simple model gives for the state of the cables: not one pair more or less may change. Slots that leave
// their plane or sub-port are counted by the engines, so a move and a move back count too.
package lab
