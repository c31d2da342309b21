// Package memory is a data plane that forwards nothing and obeys every rule of fare.v1.DataplaneService: the embedded
// default of the lab, the fake of the daemon's tests, and the reference that the conformance suite (api/dptest) runs
// against first.
//
// It validates as strictly as a data plane that programs hardware would, so that a mistake of the control plane shows
// where it is cheap. Forward and SlotPath answer where a packet would leave, from the same state that the operations
// programmed: what the lab prints is what "packets" obey, a sub-port that is down included.
//
// Tests and the lab inject what goes wrong in the field: late acknowledgements (DelayAcks), refusals (RefuseNext), a
// broken stream (BreakStream), a data plane that lost its memory (Reset).
//
// An operation is applied when it arrives; a delay holds back only its acknowledgement. IN_EFFECT is therefore never
// claimed before it is true.
package memory
