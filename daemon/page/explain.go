package page

import (
	"context"
	"encoding/json"
	"net/http"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// explanation is fare.v1.Explanation for the page.
type explanation struct {
	Planes []explainedPlane `json:"planes"`
	Routes []explainedRoute `json:"routes"`
	Rules  []string         `json:"rules"`
	Slots  []explainedSlot  `json:"slots"`
}

type explainedPlane struct {
	Plane string          `json:"plane"`
	Bits  uint64          `json:"bps"`
	Rule  string          `json:"rule"`
	Nodes []explainedNode `json:"nodes"`
}

type explainedNode struct {
	Node       string   `json:"node"`
	Devices    []string `json:"devices"`
	Local      uint64   `json:"local_bps"`
	Advertised *uint64  `json:"advertised_bps"` // null without a bandwidth
	Bits       uint64   `json:"bps"`
}

type explainedRoute struct {
	Session    string   `json:"session"`
	Node       string   `json:"node"`
	Advertised *uint64  `json:"advertised_bps"`
	Path       []uint32 `json:"as_path"`
	Raw        []string `json:"communities"`
	Reason     string   `json:"reason,omitempty"`
}

type explainedSlot struct {
	Source string `json:"source"`
	Slot   uint32 `json:"slot"`
	Plane  string `json:"plane"`
	Device string `json:"device"`
	Port   uint32 `json:"port"`
	Share  uint32 `json:"share_ppb"`
}

// maxSlots bounds the shown slots: 8 sources with 128 slots each would be a long list.
const maxSlots = 256

// explain answers with the inputs and rules behind the weights of a destination, for the source group of the given
// source.
func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	n, q := s.node(r), r.URL.Query()
	if n == nil {
		http.Error(w, "no such node", http.StatusNotFound)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	request := &farev1.GetWeightsRequest{Destination: q.Get("destination"), Explain: true}
	if source := q.Get("source"); source != "" {
		request.Sources = []string{source}
	}
	answer, err := n.Source.GetWeights(ctx, request)
	if err != nil || len(answer.Weights) == 0 {
		text := "no route to this destination"
		if err != nil {
			text = err.Error()
		}
		http.Error(w, text, http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(explained(answer.Weights[0])) // a failed write ends the connection
}

func explained(d *farev1.DestinationWeights) explanation {
	x := d.GetExplanation()
	out := explanation{Planes: []explainedPlane{}, Routes: []explainedRoute{}, Rules: append([]string{}, x.GetRules()...), Slots: []explainedSlot{}}
	value := func(bits uint64, known bool) *uint64 {
		if !known {
			return nil
		}
		return &bits
	}
	for _, p := range x.GetPlanes() {
		row := explainedPlane{Plane: p.Plane, Bits: p.BandwidthBps, Rule: p.Rule, Nodes: []explainedNode{}}
		for _, n := range p.Nodes {
			row.Nodes = append(row.Nodes, explainedNode{n.Node, append([]string{}, n.Devices...), n.LocalBps, value(n.AdvertisedBps, n.HasBandwidth), n.BandwidthBps})
		}
		out.Planes = append(out.Planes, row)
	}
	for _, r := range x.GetRoutes() {
		row := explainedRoute{Session: r.Session, Node: r.Node, Advertised: value(r.AdvertisedBps, r.HasBandwidth), Path: append([]uint32{}, r.AsPath...), Raw: []string{}, Reason: r.Reason}
		for _, c := range r.Communities {
			text := c.Raw + " " + c.Meaning
			if c.Reason != "" {
				text += " (" + c.Reason + ")"
			}
			row.Raw = append(row.Raw, text)
		}
		out.Routes = append(out.Routes, row)
	}
	for _, p := range d.Pairs {
		for _, slot := range p.Slots {
			if len(out.Slots) < maxSlots {
				out.Slots = append(out.Slots, explainedSlot{p.Source, slot.Slot, slot.Plane, slot.Device, slot.SourcePort, slot.SharePpb})
			}
		}
	}
	return out
}
