package status

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"net/netip"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

const (
	defaultPageSize = 1000
	maxPageSize     = 10_000
	// maxMessageBytes is where a page or a watch's message ends early: a quarter of what gRPC clients accept by default,
	// with room for one destination of the largest size (64 planes x 64 sub-ports, 128 slots a pair).
	maxMessageBytes = 1 << 20
)

// weightService implements fare.v1.WeightService.
type weightService struct {
	farev1.UnimplementedWeightServiceServer
	s *Service
}

// GetWeights implements fare.v1.WeightService.
func (w *weightService) GetWeights(ctx context.Context, req *farev1.GetWeightsRequest) (*farev1.GetWeightsResponse, error) {
	prefix, err := parseHost(req.GetDestination())
	if err != nil {
		return nil, toRPC(fieldErrors{{"destination", err.Error()}})
	}
	var got explained
	if req.GetExplain() {
		got, err = w.s.c.Reader.explain(ctx, prefix, w.s.c.Explain)
	} else {
		got.view, err = w.s.c.Reader.View(ctx)
	}
	if err != nil {
		return nil, loopError(ctx, err)
	}
	sources, bad := parseSources("sources", req.GetSources(), got.view.layout)
	if len(bad) > 0 {
		return nil, toRPC(bad)
	}
	d := got.view.pages.get(prefix)
	if d == nil {
		return nil, toRPC(&Problem{
			Kind: NotFound, Subject: prefix.String(), Err: fmt.Errorf("no route to it has been learned on any session"),
			Remedy: "list the known destinations with ListWeights, and check that leaves announce it and that it is inside an accepted range",
		})
	}
	got.view.layout.await(ctx, prefix.Addr(), sources)
	out := &farev1.GetWeightsResponse{Revision: got.view.revision, Weights: got.view.render(d, sources, false)}
	if got.explanation != nil {
		out.Weights.Explanation = got.explanation.render()
	}
	return out, nil
}

// ListWeights implements fare.v1.WeightService.
func (w *weightService) ListWeights(ctx context.Context, req *farev1.ListWeightsRequest) (*farev1.ListWeightsResponse, error) {
	view, err := w.s.c.Reader.View(ctx)
	if err != nil {
		return nil, loopError(ctx, err)
	}
	f, err := parseFilter("filter", req.GetFilter(), view.layout)
	if err != nil {
		return nil, toRPC(err)
	}
	size := int(req.GetPageSize())
	switch {
	case size == 0:
		size = defaultPageSize
	case size > maxPageSize:
		return nil, toRPC(fieldErrors{{"page_size", fmt.Sprintf("%d is too large: ask for at most %d", size, maxPageSize)}})
	}
	after, err := parseToken(req.GetPageToken(), f)
	if err != nil {
		return nil, toRPC(fieldErrors{{"page_token", err.Error()}})
	}
	out := &farev1.ListWeightsResponse{Revision: view.revision}
	bytes := 0
	for d := range view.selected(f, after) {
		if len(out.Weights) == size || bytes >= maxMessageBytes {
			out.NextPageToken = makeToken(after, f)
			break
		}
		m := view.render(d, f.sources, f.omitPairs)
		out.Weights = append(out.Weights, m)
		bytes += proto.Size(m)
		after = d.prefix
	}
	return out, nil
}

// tokenVersion is the first byte of a page token; the filter's hash (8 bytes) and the last destination listed follow.
// A token names a place in the address order, not a revision: it stays good however the list changes.
const tokenVersion = 1

func makeToken(last netip.Prefix, f *filter) string {
	b := binary.BigEndian.AppendUint64([]byte{tokenVersion}, f.hash())
	b, _ = last.AppendBinary(b) // documented never to fail
	return base64.RawURLEncoding.EncodeToString(b)
}

// parseToken returns the destination that a page starts after; invalid for the first page.
func parseToken(token string, f *filter) (netip.Prefix, error) {
	if token == "" {
		return netip.Prefix{}, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(token)
	var last netip.Prefix
	if err != nil || len(b) < 9 || b[0] != tokenVersion || last.UnmarshalBinary(b[9:]) != nil || !last.IsValid() {
		return netip.Prefix{}, fmt.Errorf("it is not a next_page_token of this service: leave it empty to start again")
	}
	if binary.BigEndian.Uint64(b[1:]) != f.hash() {
		return netip.Prefix{}, fmt.Errorf("it belongs to a list with another filter: keep the filter, or leave the token empty to start again")
	}
	return last, nil
}
