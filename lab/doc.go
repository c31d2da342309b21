// Package lab runs a whole fabric on one machine: leaves and GPU servers with real BGP sessions, and cables that can be
// cut.
//
// A topo.Spec describes the fabric. By default it consists of daemons in this process, on 127.0.0.0/8, with in-memory
// data planes, and needs no root. With Options.Netns it consists of network namespaces, veth pairs, processes and the
// kernel's forwarding, and packets flow all the time. With Options.Containerlab it consists of containers that
// containerlab deploys, also with packets. Package backend hides the difference, package probe measures packets and
// weights, and package judge computes the weights that must hold; the three do not know each other's results.
//
// A scenario is a text of steps. After each step every pair of GPUs in the fabric must have exactly the weights that an
// independent, simple model computes from the state of the cables: no pair may differ, also none that the step does not
// concern. The engines count slots that leave their plane or sub-port, so a move and a move back count as two; for
// daemons in separate processes, the lab counts them from WatchWeights. Where packets flow, they are the final check:
// none may be lost while nothing changes, and each plane must carry the part that its weight gives it.
package lab
