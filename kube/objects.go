package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/fared/fared/kube/apiserver"
	"github.com/fared/fared/kube/nodestate"
)

// Keys of the objects toward the API server.
const (
	keyConditions = "conditions"
	keyDrains     = "drains"
	keyLabels     = "labels"
	keyState      = "state"
	keyTaints     = "taints"
)

// Group and Version are those of FaredNodeState and FaredDrain.
const (
	Group   = "fared.io"
	Version = "v1alpha1"
)

// manager is the field manager of the node's conditions and labels: other managers keep their own.
const manager = "fared-kube"

// object is a JSON object.
type object = map[string]any

// encode returns the JSON of a value that has one.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // unreachable: values are maps, strings and numbers
	}
	return b
}

// writeAPI writes an object to the API server.
func (a *Agent) writeAPI(ctx context.Context, key, body string) error {
	node := "/api/v1/nodes/" + url.PathEscape(a.Node)
	switch key {
	case keyConditions:
		return a.apply(ctx, node+"/status", body)
	case keyDrains:
		return a.writeDrains(ctx, body)
	case keyLabels:
		return a.apply(ctx, node, body)
	case keyTaints:
		return a.taints.write(ctx, body)
	}
	return a.writeState(ctx, body)
}

// apply makes a server-side apply. A field that another manager has set becomes ours.
func (a *Agent) apply(ctx context.Context, path, body string) error {
	return a.API.Do(ctx, http.MethodPatch, path+"?fieldManager="+manager+"&force=true", apiserver.Apply, []byte(body), nil)
}

// writeState replaces the status of the node's FaredNodeState, and creates the object if it is absent. It is no
// server-side apply, which an API server with an older CRD refuses for unknown fields; here they are dropped.
func (a *Agent) writeState(ctx context.Context, body string) error {
	base := "/apis/" + Group + "/" + Version + "/farednodestates"
	status := json.RawMessage(fmt.Sprintf(`{"written":%q,%s`, time.Now().UTC().Format(time.RFC3339), body[1:]))
	replace := func() error {
		patch := encode([]object{{"op": "add", "path": "/status", "value": status}})
		return a.API.Do(ctx, http.MethodPatch, base+"/"+url.PathEscape(a.Node)+"/status", apiserver.JSON, patch, nil)
	}
	err := replace()
	if !apiserver.Is(err, http.StatusNotFound) {
		return err
	}
	uid := a.uid.Load()
	if uid == nil {
		return fmt.Errorf("the node %s is unknown so far", a.Node)
	}
	created := encode(object{"apiVersion": Group + "/" + Version, "kind": "FaredNodeState", "metadata": object{"name": a.Node,
		"ownerReferences": []object{{"apiVersion": "v1", "kind": "Node", "name": a.Node, "uid": *uid}}}})
	err = a.API.Do(ctx, http.MethodPost, base, "application/json", created, nil)
	if apiserver.Is(err, http.StatusNotFound) {
		return fmt.Errorf("the CustomResourceDefinition farednodestates.%s is missing: set nodeState.crd: %w", Group, err)
	}
	if err != nil && !apiserver.Is(err, http.StatusConflict) {
		return err
	}
	return replace()
}

// nodeBody returns the part of a node that one apply has.
func nodeBody(name string, part object) string {
	all := object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": name}}
	for key, value := range part {
		all[key] = value
	}
	return string(encode(all))
}

// condition is a node condition with its time.
type condition struct {
	nodestate.Condition
	Since string `json:"lastTransitionTime"`
}

// conditionsBody returns the body of the apply of conditions.
func conditionsBody(node string, conditions []condition) string {
	return nodeBody(node, object{"status": object{"conditions": conditions}})
}

// labelsBody returns the body of the apply of labels.
func labelsBody(node string, labels map[string]string) string {
	return nodeBody(node, object{"metadata": object{"name": node, "labels": labels}})
}
