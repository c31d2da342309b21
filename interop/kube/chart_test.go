package kube

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	helm3chart "helm.sh/helm/v3/pkg/chart/loader"
	helm3 "helm.sh/helm/v3/pkg/chartutil"
	helm3engine "helm.sh/helm/v3/pkg/engine"
	helm3lint "helm.sh/helm/v3/pkg/lint"
	helm3severity "helm.sh/helm/v3/pkg/lint/support"
	helm4 "helm.sh/helm/v4/pkg/chart/common"
	helm4values "helm.sh/helm/v4/pkg/chart/common/util"
	helm4lint "helm.sh/helm/v4/pkg/chart/v2/lint"
	helm4severity "helm.sh/helm/v4/pkg/chart/v2/lint/support"
	helm4chart "helm.sh/helm/v4/pkg/chart/v2/loader"
	helm4engine "helm.sh/helm/v4/pkg/engine"
)

const (
	chart     = "../../charts/fared"
	release   = "fared"
	namespace = "fared-system"
	// kubernetes is the cluster's version, which the libraries take for that of their own build.
	kubernetes = "v1.37.2"
)

// sets returns the sets of values of the chart, by name.
func sets(t *testing.T) map[string]map[string]any {
	t.Helper()
	files, err := filepath.Glob(chart + "/ci/*.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d sets of values, %v", len(files), err)
	}
	all := map[string]map[string]any{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimSuffix(filepath.Base(file), ".yaml")] = values(t, string(text))
	}
	return all
}

// values parses values as helm does.
func values(t *testing.T, text string) map[string]any {
	t.Helper()
	v, err := helm3.ReadValues([]byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return v
}

// render3 returns the manifests that Helm 3 renders, by template.
func render3(values map[string]any) (map[string]string, error) {
	c, err := helm3chart.Load(chart)
	if err != nil {
		return nil, err
	}
	capabilities := helm3.DefaultCapabilities.Copy()
	capabilities.KubeVersion.Version = kubernetes
	v, err := helm3.ToRenderValues(c, values, helm3.ReleaseOptions{Name: release, Namespace: namespace, IsInstall: true, Revision: 1}, capabilities)
	if err != nil {
		return nil, err
	}
	return helm3engine.Render(c, v)
}

// render4 is render3 with Helm 4.
func render4(values map[string]any) (map[string]string, error) {
	c, err := helm4chart.Load(chart)
	if err != nil {
		return nil, err
	}
	capabilities := helm4.DefaultCapabilities.Copy()
	capabilities.KubeVersion.Version = kubernetes
	v, err := helm4values.ToRenderValues(c, values, helm4.ReleaseOptions{Name: release, Namespace: namespace, IsInstall: true, Revision: 1}, capabilities)
	if err != nil {
		return nil, err
	}
	return helm4engine.Render(c, v)
}

// render returns the manifests of a set of values as one text, in the order of the templates' names.
func render(t *testing.T, values map[string]any) string {
	t.Helper()
	files, err := render3(values)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, name := range slices.Sorted(maps.Keys(files)) {
		for text := range strings.SplitSeq(files[name], "\n---") {
			if text = strings.TrimSpace(text); strings.HasSuffix(name, ".yaml") && text != "" {
				all = append(all, text+"\n")
			}
		}
	}
	return strings.Join(all, "---\n")
}

// TestLint checks that both versions of Helm find nothing but the absence of an icon.
func TestLint(t *testing.T) {
	for name, v := range sets(t) {
		for _, m := range helm3lint.All(chart, v, namespace, true).Messages {
			if m.Severity > helm3severity.InfoSev {
				t.Errorf("%s: Helm 3: %v", name, m)
			}
		}
		for _, m := range helm4lint.RunAll(chart, v, namespace).Messages {
			if m.Severity > helm4severity.InfoSev {
				t.Errorf("%s: Helm 4: %v", name, m)
			}
		}
	}
}

// TestBothVersions checks that both versions of Helm render the same manifests.
func TestBothVersions(t *testing.T) {
	for name, v := range sets(t) {
		three, err := render3(v)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		four, err := render4(v)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !maps.Equal(three, four) {
			t.Errorf("%s: Helm 3 renders\n%v\nand Helm 4\n%v", name, three, four)
		}
	}
}

// TestDefaultsNeedNodes checks that the chart is not installed without a configuration.
func TestDefaultsNeedNodes(t *testing.T) {
	if _, err := render3(nil); err == nil || !strings.Contains(err.Error(), "set fabric.description, nodes or existingConfigMap") {
		t.Error(err)
	}
}

// TestRefused checks that wrong values are refused by both versions of Helm with the key's name.
func TestRefused(t *testing.T) {
	for _, test := range []struct{ values, want string }{
		{"fabrics: {}", "'fabrics'"},
		{"fabric: {descriptions: x}", "'/fabric': additional properties 'descriptions'"},
		{"fabric: {description: [1]}", "'/fabric/description'"},
		{"fabric: {nodes: {gpu-a: leaf0}}", "'/fabric/nodes/gpu-a'"},
		{"fabric: {nodes: {gpu-a: server0}}", "'/fabric/nodes/gpu-a'"},
		{"fabric: {nodes: {GPU_A: server1}}", "'/fabric/nodes': additional properties 'GPU_A'"},
		{"common: [log]", "'/common'"},
		{"nodes: {Gpu: {as: 7}}", "'/nodes': additional properties 'Gpu'"},
		{"nodes: {gpu-a: 7}", "'/nodes/gpu-a'"},
		{"existingConfigMap: Fared_Nodes", "'/existingConfigMap'"},
		{"image: {repository: Fared}", "'/image/repository'"},
		{"image: {tag: 'a b'}", "'/image/tag'"},
		{"image: {pullPolicy: Sometimes}", "'/image/pullPolicy'"},
		{"image: {pullSecrets: [registry]}", "'/image/pullSecrets/0'"},
		{"controlPlane: {user: 0}", "'/controlPlane/user'"},
		{"controlPlane: {user: fared}", "'/controlPlane/user'"},
		{"controlPlane: {netRaw: 'yes'}", "'/controlPlane/netRaw'"},
		{"controlPlane: {expect: planes}", "'/controlPlane/expect'"},
		{"controlPlane: {logLevel: verbose}", "'/controlPlane/logLevel'"},
		{"controlPlane: {resources: {requests: {cpu: many}}}", "'/controlPlane/resources/requests/cpu'"},
		{"dataplane: {driver: memory}", "'/dataplane/driver'"},
		{"dataplane: {allowPrefixes: [10.255.0.0]}", "'/dataplane/allowPrefixes/0'"},
		{"dataplane: {allowDevices: 'eth*'}", "'/dataplane/allowDevices'"},
		{"dataplane: {extraArgs: [buckets=4096]}", "'/dataplane/extraArgs/0'"},
		{"cni: {enabled: true, directory: opt/cni/bin}", "'/cni/directory'"},
		{"cni: {enable: true}", "'/cni': additional properties 'enable'"},
		{"nri: {index: 90}", "'/nri/index'"},
		{"nri: {wait: 31s}", "'/nri/wait'"},
		{"metrics: {port: 70000}", "'/metrics/port'"},
		{"metrics: {host: 0.0.0.0}", "'/metrics/host'"},
		{"podMonitor: {interval: 15}", "'/podMonitor/interval'"},
		{"prometheusRule: {labels: {release: 1}}", "'/prometheusRule/labels/release'"},
		{"nodeState: {unusableBelow: 101}", "'/nodeState/unusableBelow'"},
		{"nodeState: {taints: {driver: DRA}}", "'/nodeState/taints/driver'"},
		{"nodeState: {taints: {effect: NoRun}}", "'/nodeState/taints/effect'"},
		{"nodeState: {drains: plane/p2}", "'/nodeState/drains'"},
		{"nodeState: {drainAtShutdown: 30s}", "'/nodeState/drainAtShutdown'"},
		{"nodeState: {nvsentinel: {directory: run}}", "'/nodeState/nvsentinel/directory'"},
		{"fleet: {workers: 10}", "'/fleet/workers'"},
		{"fleet: {report: {to: [fleet1]}}", "'/fleet/report/to/0'"},
		{"nodeState: {nvsentinel: {user: root}}", "'/nodeState/nvsentinel/user'"},
		{"maxUnavailable: 0", "'/maxUnavailable'"},
		{"maxUnavailable: 100%", "'/maxUnavailable'"},
		{"terminationGracePeriodSeconds: 1", "'/terminationGracePeriodSeconds'"},
		{"tolerations: [{operator: Always}]", "'/tolerations/0/operator'"},
		{"podLabels: {team: 7}", "'/podLabels/team'"},
		// Templates refuse combinations.
		{"fabric: {nodes: {a: server1}}", "fabric.nodes needs fabric.description"},
		{"existingConfigMap: mine\nnodes: {a: {as: 7}}", "existingConfigMap excludes"},
		{"nodes: {a: {as: 7}}\nfleet: {workers: 1}", "fleet.workers needs fleet.secret"},
		{"nodes: {common: {as: 7}}", "a node cannot be named common"},
		{"nodes: {a: {as: 7}}\nmetrics: {enabled: false}\npodMonitor: {enabled: true}", "podMonitor.enabled needs metrics.enabled"},
	} {
		v := values(t, test.values)
		for version, render := range map[int]func(map[string]any) (map[string]string, error){3: render3, 4: render4} {
			if _, err := render(v); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("Helm %d, %s: no %q in %v", version, test.values, test.want, err)
			}
		}
	}
}
