package status

import (
	"context"
	"errors"
	"testing"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// fakeProofs is a prober with a finding.
type fakeProofs struct{}

func (fakeProofs) Status() *farev1.ProofStatus {
	return &farev1.ProofStatus{
		Port: 4796, Answering: 2, Destinations: 5, Planes: []*farev1.ProofPlane{{Plane: "p0", Sent: 9, Answered: 7, Lost: 1, RoundTripNs: 1500}},
		Findings: []*farev1.ProofFinding{{Problem: "lost", Direction: "ours", Plane: "p1", Device: "eth1"}, {Problem: "lost", Direction: "ours", Plane: "p1", Device: "eth1", Mtu: true}},
		Counters: []*farev1.Counter{{Name: `proof_dropped{reason="key"}`, Value: 3}},
	}
}

func (fakeProofs) Proof(key Key) *farev1.DestinationProof {
	return &farev1.DestinationProof{PlanesProved: 3, Planes: 4, Reason: key.String()}
}

func (fakeProofs) Ping(_ context.Context, req *farev1.PingRequest) (*farev1.PingResponse, error) {
	if req.Destination == "" {
		return nil, &Problem{Kind: NotFound, Subject: "it", Err: errors.New("is unknown"), Remedy: "name another"}
	}
	return &farev1.PingResponse{Destination: req.Destination}, nil
}

// TestProofs checks that the answers and metrics have the results of probes, and that a daemon without probes has
// none.
func TestProofs(t *testing.T) {
	l := newFake(1, 10)
	l.vectors[1] = l.randomVector()
	l.builder.MarkVector(1)
	for i := range 3 {
		l.destinations[prefixAt(i)] = Destination{Vector: uint32(1 + i%2)} // there is no vector 2
		l.builder.MarkDestination(prefixAt(i))
	}
	l.builder.Commit()
	l.start(t)
	without := serve(t, l.service(t, nil), nil)
	if st, err := without.fabric.GetStatus(t.Context(), &farev1.GetStatusRequest{}); err != nil || st.Proof != nil {
		t.Errorf("without probes: %v, %v", st.GetProof(), err)
	}
	if _, err := without.fabric.Ping(t.Context(), &farev1.PingRequest{Destination: "10.255.1.0"}); grpcstatus.Code(err) != codes.FailedPrecondition {
		t.Errorf("without probes: %v", err)
	}
	reg, _, s := newMetrics(t, l)
	with := serve(t, s, nil)
	st, err := with.fabric.GetStatus(t.Context(), &farev1.GetStatusRequest{})
	if err != nil || len(st.GetProof().GetFindings()) != 2 {
		t.Fatalf("%v, %v", st.GetProof(), err)
	}
	list, err := with.weights.ListWeights(t.Context(), &farev1.ListWeightsRequest{})
	if err != nil || len(list.Weights) == 0 {
		t.Fatalf("%v, %v", list, err)
	}
	for _, row := range list.Weights {
		if want := row.Reachable; (row.Proof != nil) != want || want && row.Proof.Reason != row.Destination {
			t.Errorf("%s, reachable %v: %v", row.Destination, row.Reachable, row.Proof)
		}
	}
	if one, err := with.weights.GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: list.Weights[0].Destination}); err != nil || one.Weights[0].Reachable && one.Weights[0].Proof.GetPlanesProved() != 3 {
		t.Errorf("%v, %v", one, err)
	}
	if _, err := with.fabric.Ping(t.Context(), &farev1.PingRequest{}); grpcstatus.Code(err) != codes.NotFound {
		t.Errorf("a Problem: %v", err)
	}
	families := gather(t, reg)
	for name, want := range map[string]float64{
		"fared_proof_active": 1, "fared_proof_findings": 2, "fared_proof_round_trip_ns": 1500, "fared_proof_dropped_total": 3,
	} {
		m := families[name].GetMetric()
		if len(m) != 1 || m[0].GetGauge().GetValue()+m[0].GetCounter().GetValue() != want {
			t.Errorf("%s: %v, want %v", name, m, want)
		}
	}
}
