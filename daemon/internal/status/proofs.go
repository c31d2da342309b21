package status

import (
	"context"
	"errors"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Proofs are the results of probes (package prober). Its methods are called on the goroutines of requests.
type Proofs interface {
	Status() *farev1.ProofStatus
	Proof(Key) *farev1.DestinationProof
	// Ping returns Problems.
	Ping(context.Context, *farev1.PingRequest) (*farev1.PingResponse, error)
}

// prove adds the results of probes of a row's destination.
func (s *Service) prove(row *farev1.DestinationWeights, key Key) {
	if s.c.Proofs != nil && row.Reachable {
		row.Proof = s.c.Proofs.Proof(key)
	}
}

// Ping implements fare.v1.FabricService.
func (f *fabricService) Ping(ctx context.Context, req *farev1.PingRequest) (*farev1.PingResponse, error) {
	if f.s.c.Proofs == nil {
		return nil, toRPC(&Problem{Kind: Refused, Subject: "proof", Err: errors.New("no probes are sent by this daemon"), Remedy: "a server with a data plane and proof.enabled sends probes"})
	}
	out, err := f.s.c.Proofs.Ping(ctx, req)
	return out, toRPC(err)
}
