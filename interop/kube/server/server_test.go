package server

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/yaml"

	"github.com/fared/fared/internal/testkit/testlog"
	"github.com/fared/fared/kube"
	"github.com/fared/fared/kube/apiserver"
)

type object = map[string]any

const (
	namespace = "fared-system"
	states    = "/apis/fared.io/v1alpha1/farednodestates"
	crds      = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	bindings  = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
	drains    = "/apis/fared.io/v1alpha1/fareddrains"
	rules     = "/apis/resource.k8s.io/v1/devicetaintrules"
)

// paths has the paths of the kinds that the chart renders.
var paths = map[string]string{
	"CustomResourceDefinition": crds,
	"ServiceAccount":           "/api/v1/namespaces/" + namespace + "/serviceaccounts",
	"ConfigMap":                "/api/v1/namespaces/" + namespace + "/configmaps",
	"DaemonSet":                "/apis/apps/v1/namespaces/" + namespace + "/daemonsets",
	"Role":                     "/apis/rbac.authorization.k8s.io/v1/namespaces/" + namespace + "/roles",
	"RoleBinding":              "/apis/rbac.authorization.k8s.io/v1/namespaces/" + namespace + "/rolebindings",
	"ClusterRole":              "/apis/rbac.authorization.k8s.io/v1/clusterroles",
	"ClusterRoleBinding":       "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",

	"ValidatingAdmissionPolicy":        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
	"ValidatingAdmissionPolicyBinding": bindings,
}

// cluster is a real API server with the chart's objects.
type cluster struct {
	*process
	// account has the credentials of the chart's service account.
	account string
	agents  testlog.Log // their log
}

// render returns the manifests of a set of values, by file.
func render(t *testing.T, values string) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../../charts/fared/ci/" + values)
	if err != nil {
		t.Fatal(err)
	}
	v, err := chartutil.ReadValues(text)
	if err != nil {
		t.Fatal(err)
	}
	chart, err := loader.Load("../../../charts/fared")
	if err != nil {
		t.Fatal(err)
	}
	capabilities := chartutil.DefaultCapabilities.Copy()
	capabilities.KubeVersion.Version = "v1.37.2"
	options := chartutil.ReleaseOptions{Name: "fared", Namespace: namespace, IsInstall: true, Revision: 1}
	v, err = chartutil.ToRenderValues(chart, v, options, capabilities)
	if err != nil {
		t.Fatal(err)
	}
	files, err := engine.Render(chart, v)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// newCluster starts an API server, and applies the manifests of a set of values.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{process: start(t), account: t.TempDir()}
	c.must(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": namespace}}, nil)
	for name, file := range render(t, "state.yaml") {
		if strings.HasSuffix(name, ".yaml") {
			for document := range strings.SplitSeq(file, "\n---") {
				c.apply(document)
			}
		}
	}
	c.write("ca.crt", c.file("ca.crt"))
	return c
}

// file returns the text of a file of the server.
func (c *cluster) file(name string) string {
	c.t.Helper()
	text, err := os.ReadFile(filepath.Join(c.dir, name))
	if err != nil {
		c.t.Fatal(err)
	}
	return string(text)
}

// write writes a file of the account.
func (c *cluster) write(name, text string) {
	c.t.Helper()
	if err := os.WriteFile(filepath.Join(c.account, name), []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
}

// apply applies a document as kubectl does, strictly.
func (c *cluster) apply(document string) {
	c.t.Helper()
	var o object
	if err := yaml.Unmarshal([]byte(document), &o); err != nil {
		c.t.Fatal(err)
	}
	if o == nil {
		return
	}
	kind, name := o["kind"].(string), o["metadata"].(object)["name"].(string)
	if paths[kind] == "" {
		c.t.Fatalf("the chart has a %s", kind)
	}
	body, _ := json.Marshal(o)
	if err := c.admin.Do(context.Background(), http.MethodPatch, paths[kind]+"/"+name+"?fieldManager=helm&fieldValidation=Strict", apiserver.Apply, body, nil); err != nil {
		c.t.Fatalf("%v\n%s", err, document)
	}
}

// must makes a call as administrator.
func (c *cluster) must(method, path string, in, out any) {
	c.t.Helper()
	var body []byte
	contentType := ""
	if in != nil {
		body, _ = json.Marshal(in)
		contentType = "application/json"
	}
	if method == http.MethodPatch {
		contentType = apiserver.JSON
	}
	if err := c.admin.Do(context.Background(), method, path, contentType, body, out); err != nil {
		c.t.Fatal(err)
	}
}

// node adds a node.
func (c *cluster) node(name string) {
	c.t.Helper()
	c.must(http.MethodPost, "/api/v1/nodes", object{"metadata": object{"name": name}}, nil)
}

// pod gives the account the token of a pod on a node, as the kubelet does.
func (c *cluster) pod(node string) {
	c.t.Helper()
	var pod struct{ Metadata struct{ UID string } }
	const pods = "/api/v1/namespaces/" + namespace + "/pods"
	c.must(http.MethodPost, pods, object{"metadata": object{"name": node}, "spec": object{"nodeName": node, "serviceAccountName": "fared",
		"containers": []object{{"name": "kube", "image": "fared"}}}}, &pod)
	var request struct{ Status struct{ Token string } }
	c.must(http.MethodPost, paths["ServiceAccount"]+"/fared/token", object{"spec": object{
		"boundObjectRef": object{"apiVersion": "v1", "kind": "Pod", "name": node, "uid": pod.Metadata.UID}}}, &request)
	c.write("token", request.Status.Token)
}

// run runs an agent of a node until the test ends.
func (c *cluster) run(node string, d *daemon, running *sync.WaitGroup, ctx context.Context, taints string) {
	a := kube.New(kube.Options{Node: node, Version: "0.1.0", Daemon: d, API: apiserver.New(c.base, c.account), UnusableBelow: 50, Labels: taints != "",
		Drains: taints != "", DrainCordoned: taints != "", Taints: taints, TaintEffect: "NoExecute", Log: slog.New(slog.NewTextHandler(&c.agents, nil)), Sys: c.account})
	running.Go(func() { a.Run(ctx) })
}

// seen is the API server's view of a node, in one line.
func (c *cluster) seen(name string) string {
	var state struct {
		Metadata struct{ OwnerReferences []struct{ Name string } }
		Status   struct {
			PlanesUsable, Summary string
			Planes                []struct{ State string }
		}
	}
	var node struct {
		Metadata struct{ Labels map[string]string }
		Status   struct {
			Conditions []struct{ Type, Status, Reason string }
		}
	}
	var tainted struct {
		Items []struct {
			Spec struct {
				DeviceSelector struct{ Driver, Pool, Device string }
				Taint          struct{ Key, Value, Effect string }
			}
		}
	}
	_ = c.admin.Do(context.Background(), http.MethodGet, states+"/"+name, "", nil, &state)
	c.must(http.MethodGet, "/api/v1/nodes/"+name, nil, &node)
	c.must(http.MethodGet, rules, nil, &tainted)
	text := fmt.Sprint(state.Status.PlanesUsable, " ", node.Metadata.Labels["fared.io/rails-usable"])
	for _, x := range node.Status.Conditions {
		text += fmt.Sprint(" ", x.Type, "=", x.Status, ",", x.Reason)
	}
	for _, x := range tainted.Items {
		text += fmt.Sprint(" ", x.Spec.DeviceSelector, x.Spec.Taint)
	}
	for _, owner := range state.Metadata.OwnerReferences {
		text += " of " + owner.Name
	}
	return text
}

// shows waits until the API server shows a node so.
func (c *cluster) shows(name, want string) {
	c.t.Helper()
	got := ""
	eventually(c.t, func() error {
		if got = c.seen(name); got != want {
			return fmt.Errorf("shown is\n%s, want\n%s", got, want)
		}
		return nil
	}, c.agents.String)
}

// table returns the rows of `kubectl get`.
func (c *cluster) table(path string) (columns []string, cells [][]any) {
	c.t.Helper()
	request, err := http.NewRequest(http.MethodGet, c.base+path, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer secret")
	request.Header.Set("Accept", "application/json;as=Table;g=meta.k8s.io;v=v1")
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	answer, err := client.Do(request)
	if err != nil {
		c.t.Fatal(err)
	}
	defer answer.Body.Close()
	var table struct {
		ColumnDefinitions []struct{ Name string }
		Rows              []struct{ Cells []any }
	}
	text, _ := io.ReadAll(answer.Body)
	if err := json.Unmarshal(text, &table); err != nil {
		c.t.Fatalf("%v\n%s", err, text)
	}
	for _, d := range table.ColumnDefinitions {
		columns = append(columns, d.Name)
	}
	for _, row := range table.Rows {
		cells = append(cells, row.Cells)
	}
	return columns, cells
}

// refuses checks that the API server refuses wrong values of a status.
func (c *cluster) refuses() {
	c.t.Helper()
	for field, wrong := range map[string]any{"sharePerMille": 1001, "faultCount": -1, "planesUsable": 3, "planes": []object{{"name": "p0", "state": "Lost"}}} {
		body, _ := json.Marshal([]object{{"op": "add", "path": "/status/" + field, "value": wrong}})
		if err := c.admin.Do(context.Background(), http.MethodPatch, states+"/gpu-a/status", apiserver.JSON, body, nil); !apiserver.Is(err, http.StatusUnprocessableEntity) {
			c.t.Errorf("%s is set to %v: %v", field, wrong, err)
		}
	}
}

// keepsToNode checks that the account of a pod of gpu-a changes no object of another node.
func (c *cluster) keepsToNode() {
	c.t.Helper()
	c.node("gpu-b")
	own := apiserver.New(c.base, c.account)
	for path, body := range map[string]string{
		"/api/v1/nodes/gpu-b":        `{"apiVersion":"v1","kind":"Node","metadata":{"name":"gpu-b","labels":{"a":"b"}}}`,
		"/api/v1/nodes/gpu-b/status": `{"apiVersion":"v1","kind":"Node","metadata":{"name":"gpu-b"},"status":{"conditions":[{"type":"Ready","status":"False"}]}}`,
		rules + "/x":                 `{"apiVersion":"resource.k8s.io/v1","kind":"DeviceTaintRule","metadata":{"name":"x"},"spec":{"taint":{"key":"a.b/c","effect":"NoExecute"}}}`,
	} {
		err := own.Do(context.Background(), http.MethodPatch, path+"?fieldManager=fared-kube&force=true", apiserver.Apply, []byte(body), nil)
		if err == nil || !strings.Contains(err.Error(), "this pod may change the objects of its node alone: gpu-a") {
			c.t.Errorf("%s: %v", path, err)
		}
	}
}

// drain creates a FaredDrain.
func (c *cluster) drain(name string, spec object) error {
	body, _ := json.Marshal(object{"apiVersion": "fared.io/v1alpha1", "kind": "FaredDrain", "metadata": object{"name": name}, "spec": spec})
	return c.admin.Do(context.Background(), http.MethodPost, drains+"?fieldValidation=Strict", "application/json", body, nil)
}

// drainedBy waits until the daemon has drains with these reasons, and FaredDrains this table: names, nodes, targets,
// states and owners.
func (c *cluster) drainedBy(d *daemon, reasons, table string) {
	c.t.Helper()
	eventually(c.t, func() error {
		_, rows := c.table(drains)
		var shown []string
		for _, row := range rows {
			shown = append(shown, strings.ReplaceAll(fmt.Sprint(row[:5]), `"`, ""))
		}
		if got := strings.Join(shown, " "); got != table || d.drains() != reasons {
			return fmt.Errorf("drains\n%s\nshown as\n%s\nwant\n%s\nand\n%s", d.drains(), got, reasons, table)
		}
		return nil
	}, c.agents.String)
}

// drains drains by objects and by a cordon; other nodes' objects and wrong ones have no effect.
func (c *cluster) drains(d *daemon) {
	c.t.Helper()
	for name, spec := range map[string]object{
		"no-node": {"targets": []string{"all"}}, "no-target": {"node": "gpu-a", "targets": []string{}}, "wrong": {"node": "gpu-a", "targets": []string{"p2"}},
		"time": {"node": "gpu-a", "targets": []string{"all"}, "until": "tomorrow"}, "unknown": {"node": "gpu-a", "targets": []string{"all"}, "who": "ada"},
	} {
		if err := c.drain(name, spec); !apiserver.Is(err, http.StatusUnprocessableEntity) && !apiserver.Is(err, http.StatusBadRequest) {
			c.t.Errorf("%s: %v", name, err)
		}
	}
	for name, spec := range map[string]object{
		"optics": {"node": "gpu-a", "targets": []string{"plane/p0"}, "owner": "ada", "reason": "new optics"}, "other": {"node": "gpu-b", "targets": []string{"plane/p1"}},
		"past": {"node": "gpu-a", "targets": []string{"plane/p1"}, "until": "2026-01-01T00:00:00Z"},
	} {
		if err := c.drain(name, spec); err != nil {
			c.t.Fatal(err)
		}
	}
	const mine, rest = "p0 FaredDrain optics: ada: new optics", " [other gpu-b [plane/p1] <nil> <nil>] [past gpu-a [plane/p1] Ended <nil>]"
	c.drainedBy(d, mine, "[optics gpu-a [plane/p0] Drained ada]"+rest)
	node := func(on bool) {
		c.must(http.MethodPatch, "/api/v1/nodes/gpu-a", []object{{"op": "add", "path": "/spec/unschedulable", "value": on}}, nil)
	}
	node(true)
	eventually(c.t, func() error {
		var state struct {
			Status struct {
				Drains []struct{ Target, Error string }
			}
		}
		c.must(http.MethodGet, states+"/gpu-a", nil, &state)
		if got := fmt.Sprint(state.Status.Drains); got != "[{plane/p0 } {plane/p1 no plane would be left}]" {
			return errors.New(got)
		}
		return nil
	}, c.agents.String)
	node(false)
	c.must(http.MethodPatch, drains+"/optics", []object{{"op": "add", "path": "/spec/targets", "value": []string{"all"}}, {"op": "add", "path": "/spec/force", "value": true}}, nil)
	c.drainedBy(d, mine+", p1"+strings.TrimPrefix(mine, "p0"), "[optics gpu-a [all] Drained ada]"+rest)
	own, patch := apiserver.New(c.base, c.account), []byte(`[{"op":"add","path":"/status","value":{"state":"Drained"}}]`)
	if err := own.Do(context.Background(), http.MethodPatch, drains+"/other/status", apiserver.JSON, patch, nil); err == nil || !strings.Contains(err.Error(), "of its node alone: gpu-a") {
		c.t.Errorf("the status of a drain of gpu-b: %v", err)
	}
	c.must(http.MethodDelete, drains+"/optics", nil, nil)
	c.drainedBy(d, "", strings.TrimPrefix(rest, " "))
}

// TestAway kills the API server while cables and drains change: meanwhile the daemon is read on, and its drains last;
// afterward the last state is shown and a drain that was deleted at once has ended. FARED_KUBE_AWAY is the time in
// seconds.
func TestAway(t *testing.T) {
	c := newCluster(t)
	c.node("gpu-a")
	c.pod("gpu-a")
	d := newDaemon()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	c.run("gpu-a", d, &running, ctx, "dra.net")
	if err := c.drain("optics", object{"node": "gpu-a", "targets": []string{"plane/p0"}}); err != nil {
		t.Fatal(err)
	}
	const drained, shown = "p0 FaredDrain optics", "[optics gpu-a [plane/p0] Drained <nil>]"
	c.drainedBy(d, drained, shown)
	for i, away := range []int{1, setting(t, "FARED_KUBE_AWAY", 15)} {
		before, _ := d.calls()
		c.kill()
		end := time.Now().Add(time.Duration(away) * time.Second)
		for flap := 0; time.Now().Before(end); flap++ {
			d.set([]string{"p1.0", "p1.1"}[:1+flap%2]...)
			time.Sleep(time.Second)
		}
		last := []string{"p0.0", "p1.0", "p1.1"}[i : i+2]
		d.set(last...)
		reads, changes := d.calls()
		if eventually(t, func() error { // also the last one
			if now, _ := d.calls(); now <= reads {
				return errors.New("the daemon is not read")
			}
			return nil
		}, c.agents.String); changes != 1 || d.drains() != drained {
			t.Errorf("meanwhile %d changes of drains: %s; %d reads", changes, d.drains(), reads-before)
		}
		c.launch()
		c.ready()
		begin := time.Now()
		c.shows("gpu-a", []string{"1/2 1 PlanesDegraded=True,CablesDown", "1/2 2 PlanesDegraded=True,PlanesDown"}[i]+" PlanesUnusable=False,EnoughPlanes of gpu-a")
		c.drainedBy(d, drained, shown)
		t.Logf("away for %d s, %d reads of the daemon meanwhile, shown after %v", away, reads-before, time.Since(begin).Round(time.Millisecond))
	}
	c.must(http.MethodDelete, drains+"/optics", nil, nil)
	c.drainedBy(d, "", "")
}

// TestServer runs the agent with the rights of the chart against a real API server: cut cables, the table, wrong
// values, another manager of the condition, an expired token, drains, an older CRD.
func TestServer(t *testing.T) {
	c := newCluster(t)
	c.node("gpu-a")
	c.pod("gpu-a")
	c.must(http.MethodPost, "/apis/resource.k8s.io/v1/resourceslices", object{"metadata": object{"name": "gpu-a"}, "spec": object{"driver": "dra.net", "nodeName": "gpu-a",
		"pool": object{"name": "gpu-a", "generation": 1, "resourceSliceCount": 1}, "devices": []object{
			{"name": "pci-5", "attributes": object{"dra.net/ifName": object{"string": "p0.0"}}}, {"name": "pci-6", "attributes": object{"dra.net/ifName": object{"string": "p0.1"}}}}}}, nil)
	d := newDaemon()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	c.run("gpu-a", d, &running, ctx, "dra.net")
	const enough = "PlanesUnusable=False,EnoughPlanes"
	c.shows("gpu-a", "2/2 2 PlanesDegraded=False,AllPlanesUp "+enough+" of gpu-a")
	d.set("p1.0")
	c.shows("gpu-a", "1.5/2 2 PlanesDegraded=True,CablesDown "+enough+" of gpu-a")
	columns, cells := c.table(states)
	if want := []string{"Name", "Planes", "Sessions", "Faults", "Summary", "Version", "Written"}; !slices.Equal(columns, want) {
		t.Errorf("columns %v, want %v", columns, want)
	}
	if got := fmt.Sprint(cells); !strings.HasPrefix(got, "[[gpu-a 1.5/2 3/4 0 p1 is degraded, p1.0: no carrier 0.1.0 ") {
		t.Errorf("rows %s", got)
	}
	c.refuses()
	t.Run("another manager", func(t *testing.T) {
		body := `{"apiVersion":"v1","kind":"Node","metadata":{"name":"gpu-a"},"status":{"conditions":[{"type":"PlanesDegraded","status":"False","reason":"Other"}]}}`
		if err := c.admin.Do(context.Background(), http.MethodPatch, "/api/v1/nodes/gpu-a/status?fieldManager=other&force=true", apiserver.Apply, []byte(body), nil); err != nil {
			t.Fatal(err)
		}
		c.shows("gpu-a", "1.5/2 2 PlanesDegraded=True,CablesDown "+enough+" of gpu-a")
	})
	d.set("p0.0", "p1.0")
	c.shows("gpu-a", "1/2 1 PlanesDegraded=True,CablesDown "+enough+" {dra.net gpu-a pci-5} {fared.io/no-plane rail0 NoExecute} of gpu-a")
	t.Run("expired token", func(t *testing.T) {
		token, err := os.ReadFile(filepath.Join(c.account, "token"))
		if err != nil {
			t.Fatal(err)
		}
		c.write("token", "expired")
		d.set()
		eventually(t, func() error {
			if !strings.Contains(c.agents.String(), "401 Unauthorized") {
				return errors.New("no attempt has failed")
			}
			return nil
		}, c.agents.String)
		c.write("token", string(token))
		c.shows("gpu-a", "2/2 2 PlanesDegraded=False,AllPlanesUp "+enough+" of gpu-a")
	})
	c.keepsToNode()
	t.Run("drains", func(t *testing.T) { c.drains(d) })
	t.Run("older CRD", func(t *testing.T) {
		c.must(http.MethodPatch, crds+"/farednodestates.fared.io", []object{
			{"op": "remove", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/summary"},
			{"op": "remove", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/proofs"}}, nil)
		c.shows("gpu-a", "2/2 2 PlanesDegraded=False,AllPlanesUp "+enough+" of gpu-a")
		d.set("p0.0", "p0.1")
		c.shows("gpu-a", "1/2 2 PlanesDegraded=True,PlanesDown "+enough+" of gpu-a")
	})
}
