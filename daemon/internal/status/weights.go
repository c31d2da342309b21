package status

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

const (
	defaultPageSize = 1000
	maxPageSize     = 10_000
	// maxMessageBytes is the size at which a page or a watch's message ends early: a quarter of the default limit of
	// gRPC clients, with room for one destination of the largest size (64 planes x 64 sub-ports, 128 slots per pair).
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
	services, more := parseServices(req.GetServices(), got.view.layout)
	if bad = append(bad, more...); len(bad) > 0 {
		return nil, toRPC(bad)
	}
	f := &filter{destinations: []netip.Prefix{prefix}, sources: sources, groups: got.view.layout.groupsOf(sources), services: services}
	rows := slices.Collect(got.view.selected(f, Key{}))
	if len(rows) == 0 {
		if got, err = w.s.c.Reader.explain(ctx, prefix, w.s.c.Explain); err != nil {
			return nil, loopError(ctx, err)
		}
		if len(got.explanations) > 0 && len(sources) == 0 { // a leaf that is a control plane alone
			return nil, toRPC(&Problem{
				Kind: Refused, Subject: prefix.String(), Err: errors.New("it is known, but without a data plane there are no weights"),
				Remedy: "set dataplane.address, or read the routes and their bandwidth at a neighbor, by fared weights --explain",
			})
		}
		return nil, toRPC(&Problem{
			Kind: NotFound, Subject: prefix.String(), Err: fmt.Errorf("no route to it has been learned on any session"),
			Remedy: "list the known destinations with ListWeights, and check that leaves announce it and that it is inside an accepted range",
		})
	}
	got.view.layout.await(ctx, prefix.Addr(), f)
	out := &farev1.GetWeightsResponse{Revision: got.view.revision}
	for _, d := range rows {
		row := got.view.render(d, f)
		w.s.prove(row, d.key)
		if e, ok := got.explanations[d.key.Source]; ok {
			row.Explanation = e.render()
		}
		out.Weights = append(out.Weights, row)
	}
	return out, nil
}

// ListWeights implements fare.v1.WeightService.
func (w *weightService) ListWeights(ctx context.Context, req *farev1.ListWeightsRequest) (*farev1.ListWeightsResponse, error) {
	view, err := w.s.c.Reader.View(ctx)
	if err != nil {
		return nil, loopError(ctx, err)
	}
	f, err := parseFilter("filter", req.GetFilter(), req.GetServices(), view.layout)
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
		m := view.render(d, f)
		w.s.prove(m, d.key)
		out.Weights = append(out.Weights, m)
		bytes += proto.Size(m)
		after = d.key
	}
	return out, nil
}

// tokenVersion is the first byte of a page token; the filter's hash (8 bytes), the source group (2 bytes) and the
// prefix of the last listed row follow. A token contains a position in the address order, not a revision: it stays
// valid however the list changes.
const tokenVersion = 2

func makeToken(last Key, f *filter) string {
	b := binary.BigEndian.AppendUint64([]byte{tokenVersion}, f.hash())
	b = binary.BigEndian.AppendUint16(b, uint16(last.Source))
	b, _ = last.Prefix.AppendBinary(b) // documented never to fail
	return base64.RawURLEncoding.EncodeToString(b)
}

// parseToken returns the destination after which a page starts; invalid for the first page.
func parseToken(token string, f *filter) (Key, error) {
	if token == "" {
		return Key{}, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(token)
	var last Key
	if err != nil || len(b) < 11 || b[0] != tokenVersion || last.Prefix.UnmarshalBinary(b[11:]) != nil || !last.IsValid() {
		return Key{}, fmt.Errorf("it is not a next_page_token of this service: leave it empty to start from the first page")
	}
	if binary.BigEndian.Uint64(b[1:]) != f.hash() {
		return Key{}, fmt.Errorf("it belongs to a list with another filter: keep the filter, or leave the token empty to start from the first page")
	}
	last.Source = int(binary.BigEndian.Uint16(b[9:]))
	return last, nil
}
