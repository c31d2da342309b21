// Package lab is a whole fabric on one machine: leaves and GPU servers with real BGP sessions, and cables that can be cut.
//
// A fabric is described by a topo.Spec. It is made of daemons in this process, on 127.0.0.0/8, with in-memory data planes, which
// needs no root; or, with Options.Netns, of network namespaces, veth pairs, processes and the kernel's forwarding, where packets
// flow all the time; or, with Options.Containerlab, of containers that containerlab deploys, where the same is so. What it is made of
// is behind one interface (backend.go); scenarios, model and checks are the same.
//
// A scenario is a text of steps. After each step every pair of GPUs in the fabric must have exactly the weights that an
// independent, simple model gives for the state of the cables: not one pair more or less may change. Slots that leave
// their plane or sub-port are counted by the engines, so a move and a move back count too; of daemons in processes of their
// own, as their subscribers see them. Where packets flow they have the last word: none may be lost while nothing changes, and
// each plane must carry its weight's part.
package lab
