package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/waits"
	"github.com/fared/fared/kube/apiserver"
	"github.com/fared/fared/kube/nodestate"
)

// drainsPath is that of FaredDrains.
const drainsPath = "/apis/" + Group + "/" + Version + "/fareddrains"

// FaredDrain is the part of the object with which an operator drains a node.
type FaredDrain struct {
	Metadata struct{ Name, UID string } `json:"metadata"`
	Spec     FaredDrainSpec             `json:"spec"`
}

// FaredDrainSpec is an operator's wish.
type FaredDrainSpec struct {
	Node string `json:"node"`
	// Targets are those of the annotation: plane/p2, leaf/10.1.0.3, sub-port/eth4, all.
	Targets []string `json:"targets"`
	Reason  string   `json:"reason,omitempty"`
	Owner   string   `json:"owner,omitempty"`
	// Force drains a target without which a destination has no plane.
	Force bool `json:"force,omitempty"`
	// Until, if not nil, is when the drain ends.
	Until *time.Time `json:"until,omitempty"`
}

// States of FaredDrains.
const (
	Draining = "Draining"
	Drained  = "Drained"
	Refused  = "Refused" // a target
	Ended    = "Ended"   // by its time
)

// FaredDrainStatus is its outcome.
type FaredDrainStatus struct {
	State  string          `json:"state"`
	Drains []DrainedTarget `json:"drains,omitempty"`
}

// DrainedTarget is a target with the stage of its drain, as fare.v1.DrainStatus, or the error of its refusal.
type DrainedTarget struct {
	Target string `json:"target"`
	Stage  string `json:"stage,omitempty"`
	Error  string `json:"error,omitempty"`
}

// ended reports whether the drain's time is over.
func (o *FaredDrain) ended(now time.Time) bool {
	return o.Spec.Until != nil && !now.Before(*o.Spec.Until)
}

// reason is that of the daemon's drains.
func (o *FaredDrain) reason() string {
	text := objectMark + o.Metadata.Name
	for _, part := range []string{o.Spec.Owner, o.Spec.Reason} {
		if part != "" {
			text += ": " + part
		}
	}
	return text
}

// followDrains calls each for all FaredDrains of the node, by name, after changes. Without an answer of the API server
// the last ones stay in force.
func (a *Agent) followDrains(ctx context.Context, each func([]FaredDrain)) {
	path := drainsPath + "?fieldSelector=" + url.QueryEscape("spec.node="+a.Node)
	var log repeated
	for {
		err := a.listDrains(ctx, path, func(all []FaredDrain) {
			log.last = ""
			each(all)
		})
		log.warn(ctx, a.Log, "the FaredDrains are not watched now", err)
		if !waits.For(ctx, retryDelay) {
			return
		}
	}
}

// listDrains lists the FaredDrains and follows their changes until the end of the watch.
func (a *Agent) listDrains(ctx context.Context, path string, each func([]FaredDrain)) error {
	var list struct {
		Metadata struct{ ResourceVersion string }
		Items    []FaredDrain
	}
	if err := a.API.Do(ctx, http.MethodGet, path, "", nil, &list); err != nil {
		return err
	}
	all := map[string]FaredDrain{}
	publish := func() {
		each(slices.SortedFunc(maps.Values(all), func(a, b FaredDrain) int { return cmp.Compare(a.Metadata.Name, b.Metadata.Name) }))
	}
	for _, o := range list.Items {
		all[o.Metadata.Name] = o
	}
	publish()
	stream, cancel := context.WithTimeout(ctx, watchLimit+30*time.Second)
	defer cancel()
	return a.API.Watch(stream, path+"&"+watchQuery+"&resourceVersion="+url.QueryEscape(list.Metadata.ResourceVersion), func(kind string, text json.RawMessage) error {
		var o FaredDrain
		if err := json.Unmarshal(text, &o); err != nil {
			return err
		}
		if kind == "DELETED" {
			delete(all, o.Metadata.Name)
		} else {
			all[o.Metadata.Name] = o
		}
		publish()
		return nil
	})
}

// statusOf returns the status of a FaredDrain from its targets at the daemon, whose drains are shown with their stages.
func statusOf(x objectReport, shown []*farev1.DrainStatus) FaredDrainStatus {
	if x.ended {
		return FaredDrainStatus{State: Ended}
	}
	s := FaredDrainStatus{State: Drained}
	for _, t := range x.targets {
		d := DrainedTarget{Target: t.asked, Error: t.err}
		for _, y := range shown {
			if nodestate.Target(y.GetTarget()) == t.named {
				d.Stage = y.GetStage()
			}
		}
		s.Drains = append(s.Drains, d)
		switch {
		case t.err != "" || d.Stage == "given-up":
			s.State = Refused
		case d.Stage != "drained" && s.State != Refused:
			s.State = Draining
		}
	}
	return s
}

// namedStatus is the status of a FaredDrain.
type namedStatus struct {
	Name   string           `json:"name"`
	UID    string           `json:"uid"` // another object may have the name later
	Status FaredDrainStatus `json:"status"`
}

// writeDrains writes the statuses of the FaredDrains that have changed. A deleted one needs none.
func (a *Agent) writeDrains(ctx context.Context, body string) error {
	var all []namedStatus
	if err := json.Unmarshal([]byte(body), &all); err != nil {
		return err
	}
	sent := map[string]string{}
	defer func() { a.drainsSent = sent }()
	for _, x := range all {
		text := string(encode(x.Status))
		if a.drainsSent[x.UID] != text {
			patch := encode([]object{{"op": "add", "path": "/status", "value": x.Status}})
			err := a.API.Do(ctx, http.MethodPatch, drainsPath+"/"+url.PathEscape(x.Name)+"/status", apiserver.JSON, patch, nil)
			if err != nil && !apiserver.Is(err, http.StatusNotFound) {
				return err
			}
		}
		sent[x.UID] = text
	}
	return nil
}
