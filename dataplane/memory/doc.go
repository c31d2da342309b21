// Package memory implements a data plane that forwards nothing and follows every rule of fare.v1.DataplaneService: the
// embedded default of the lab, the fake in the daemon's tests, and the reference for the conformance suite
// (api/dptest).
//
// It validates as strictly as a data plane for hardware, so that errors of the control plane appear early. Forward and
// SlotPath return the egress of a packet, computed from the programmed state, including sub-ports that are down.
//
// Tests and the lab inject faults: delayed acknowledgements (DelayAcks), refusals (RefuseNext), a broken stream
// (BreakStream), and a data plane that lost its state (Reset).
//
// An operation is applied when it arrives; a delay only affects its acknowledgement. IN_EFFECT is therefore never sent
// too early.
package memory
