// Package configmap keeps one value in a ConfigMap of Kubernetes, which the API server replaces only if its
// resourceVersion is still the one that was read.
package configmap

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"

	"github.com/fared/fared/kube/apiserver"
)

// key is the key of the value in the ConfigMap, whose limit is 1 MiB.
const key = "drains"

// Object is a ConfigMap. It implements drain.Engine.
type Object struct {
	API             *apiserver.Client
	Namespace, Name string
}

// metadata is the part of an object's metadata that matters.
type metadata struct {
	Name            string `json:"name"`
	ResourceVersion string `json:"resourceVersion,omitempty"`
}

// object is a ConfigMap in JSON.
type object struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Metadata   metadata          `json:"metadata"`
	Data       map[string]string `json:"data"`
}

func (o *Object) path() string {
	return "/api/v1/namespaces/" + url.PathEscape(o.Namespace) + "/configmaps"
}

// Load implements drain.Engine. A read without resourceVersion is linearizable.
func (o *Object) Load(ctx context.Context) ([]byte, string, error) {
	var m object
	err := o.API.Do(ctx, http.MethodGet, o.path()+"/"+url.PathEscape(o.Name), "", nil, &m)
	if apiserver.Is(err, http.StatusNotFound) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	return []byte(m.Data[key]), m.Metadata.ResourceVersion, nil
}

// Store implements drain.Engine: a create without a revision, else a replacement.
func (o *Object) Store(ctx context.Context, value []byte, revision string) (bool, error) {
	body, err := json.Marshal(object{"v1", "ConfigMap", metadata{o.Name, revision}, map[string]string{key: string(value)}})
	if err != nil {
		return false, err
	}
	method, path := http.MethodPost, o.path()
	if revision != "" {
		method, path = http.MethodPut, path+"/"+url.PathEscape(o.Name)
	}
	err = o.API.Do(ctx, method, path, "application/json", body, nil)
	if apiserver.Is(err, http.StatusConflict) || revision != "" && apiserver.Is(err, http.StatusNotFound) {
		return false, nil // another book was faster, or an operator has removed the object
	}
	return err == nil, err
}
