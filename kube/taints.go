package kube

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fared/fared/kube/apiserver"
	"github.com/fared/fared/kube/nodestate"
)

const (
	resources = "resource.k8s.io"
	// nodeLabel marks the rules of a node.
	nodeLabel = "fared.io/node"
)

// tainter keeps a DeviceTaintRule for each device of a rail that has no plane left.
type tainter struct {
	api                  *apiserver.Client
	node, driver, effect string
	sys                  string // /sys, or a test's
	rules, slices        string // paths, discovered
}

// device is a device of a ResourceSlice.
type device struct{ Pool, Name string }

// resourceSlices is the part of a list of ResourceSlices that matters.
type resourceSlices struct {
	Items []struct {
		Spec struct {
			Pool    struct{ Name string }
			Devices []struct {
				Name       string
				Attributes map[string]struct{ String string }
			}
		}
	}
}

// write makes the node's rules those of lost rails.
func (t *tainter) write(ctx context.Context, body string) error {
	var rails []nodestate.Rail
	if err := json.Unmarshal([]byte(body), &rails); err != nil {
		return err
	}
	if err := t.discover(ctx); err != nil {
		return err
	}
	wanted, err := t.wanted(ctx, rails)
	if err != nil {
		return err
	}
	var present struct {
		Items []struct{ Metadata struct{ Name string } }
	}
	if err := t.api.Do(ctx, http.MethodGet, t.rules+"?labelSelector="+url.QueryEscape(nodeLabel+"="+labelOf(t.node)), "", nil, &present); err != nil {
		return err
	}
	for _, rule := range present.Items {
		name := rule.Metadata.Name
		if wanted[name] != nil {
			continue
		}
		if err := t.api.Do(ctx, http.MethodDelete, t.rules+"/"+name, "", nil, nil); err != nil && !apiserver.Is(err, http.StatusNotFound) {
			return err
		}
	}
	for name, rule := range wanted {
		if err := t.api.Do(ctx, http.MethodPatch, t.rules+"/"+name+"?fieldManager="+manager+"&force=true", apiserver.Apply, encode(rule), nil); err != nil {
			return err
		}
	}
	return nil
}

// discover finds the versions that the API server serves.
func (t *tainter) discover(ctx context.Context) error {
	for resource, path := range map[string]*string{"devicetaintrules": &t.rules, "resourceslices": &t.slices} {
		if *path != "" {
			continue
		}
		version, err := t.api.Discover(ctx, resources, resource)
		if err != nil {
			return fmt.Errorf("taints need %s of %s: %w", resource, resources, err)
		}
		*path = "/apis/" + resources + "/" + version + "/" + resource
	}
	return nil
}

// wanted returns the rules for lost rails, by name.
func (t *tainter) wanted(ctx context.Context, rails []nodestate.Rail) (map[string]object, error) {
	rules := map[string]object{}
	if len(rails) == 0 {
		return rules, nil
	}
	var all resourceSlices
	selector := "?fieldSelector=" + url.QueryEscape("spec.nodeName="+t.node+",spec.driver="+t.driver)
	if err := t.api.Do(ctx, http.MethodGet, t.slices+selector, "", nil, &all); err != nil {
		return nil, err
	}
	version := strings.Split(t.rules, "/")[3]
	for _, rail := range rails {
		for _, d := range t.devices(rail, &all) {
			sum := sha256.Sum256([]byte(t.node + "/" + t.driver + "/" + d.Pool))
			name := "fared-" + d.Name + "-" + hex.EncodeToString(sum[:5])
			rules[name] = object{"apiVersion": resources + "/" + version, "kind": "DeviceTaintRule",
				"metadata": object{"name": name, "labels": object{nodeLabel: labelOf(t.node)}},
				"spec": object{
					"deviceSelector": object{"driver": t.driver, "pool": d.Pool, "device": d.Name},
					"taint":          object{"key": "fared.io/no-plane", "value": fmt.Sprintf("rail%d", rail.Number), "effect": t.effect},
				}}
		}
	}
	return rules, nil
}

// devices returns the devices of a rail: those with the name or PCI address of one of its sub-ports, or the PCI address
// of one of their virtual functions, as their name or an attribute.
func (t *tainter) devices(rail nodestate.Rail, all *resourceSlices) (found []device) {
	var names []string
	for _, netdev := range rail.Devices {
		names = append(names, netdev)
		for _, link := range append([]string{"device"}, t.functions(netdev)...) {
			if pci, err := filepath.EvalSymlinks(filepath.Join(t.sys, "class/net", netdev, link)); err == nil {
				address := filepath.Base(pci)
				names = append(names, address, "pci-"+strings.NewReplacer(":", "-", ".", "-").Replace(address))
			}
		}
	}
	for _, slice := range all.Items {
		for _, d := range slice.Spec.Devices {
			matches := slices.Contains(names, d.Name)
			for _, a := range d.Attributes {
				matches = matches || slices.Contains(names, a.String)
			}
			if matches {
				found = append(found, device{slice.Spec.Pool.Name, d.Name})
			}
		}
	}
	return found
}

// functions returns the links of a device's virtual functions in sysfs.
func (t *tainter) functions(netdev string) (links []string) {
	found, _ := filepath.Glob(filepath.Join(t.sys, "class/net", netdev, "device/virtfn*"))
	for _, f := range found {
		links = append(links, "device/"+filepath.Base(f))
	}
	return links
}

// labelOf returns the value of nodeLabel: the node's name, or a hash of one that is too long for a label.
func labelOf(node string) string {
	if len(node) <= 63 {
		return node
	}
	sum := sha256.Sum256([]byte(node))
	return hex.EncodeToString(sum[:16])
}
