package charts

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/kube"
	"github.com/fared/fared/kube/nodestate"
)

var _ = gate.Package{WithoutRaceDetector: "drives other processes", HostNetwork: "fetches modules from the module proxy"}

// TestKube runs the tests of interop/kube, a separate module: Helm's libraries lint and render the chart, the API's
// types judge the manifests, and fared-kube writes to a real API server.
func TestKube(t *testing.T) {
	gate.Slow(t, gate.Kube, "compiles Helm 3 and 4 and an API server of Kubernetes")
	test := exec.Command("go", "test", "-C", "../interop/kube", "-count=1", "./...")
	test.Env = append(os.Environ(), "CGO_ENABLED=0", "FARED_BINARY="+binary.Fared(t))
	if out, err := test.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", test, err, out)
	}
}

// read returns the text of a file.
func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestUnits checks that the containers have the capabilities and the memory limit of the systemd units, without the
// right to sessions that are bound to a device, which is an option.
func TestUnits(t *testing.T) {
	containers := base(t).Containers
	if len(containers) != 2 {
		t.Fatalf("%d containers", len(containers))
	}
	for _, c := range containers {
		unit := read(t, map[string]string{"dataplane": "../systemd/fared-dataplane.service", "run": "../systemd/fared.service"}[c.Name])
		var want []string
		for _, name := range strings.Fields(regexp.MustCompile(`(?m)^CapabilityBoundingSet=(.*)$`).FindStringSubmatch(unit)[1]) {
			if name = strings.TrimPrefix(name, "CAP_"); c.Name != "run" || name != "NET_RAW" {
				want = append(want, name)
			}
		}
		got := slices.Sorted(slices.Values(c.SecurityContext.Capabilities.Add))
		if slices.Sort(want); !slices.Equal(got, want) {
			t.Errorf("container %s has the capabilities %v, its unit %v", c.Name, got, want)
		}
		if root := !strings.Contains(unit, "\nUser=fared\n"); root != (c.SecurityContext.RunAsUser == 0) {
			t.Errorf("container %s is user %d", c.Name, c.SecurityContext.RunAsUser)
		}
		limit := regexp.MustCompile(`GOMEMLIMIT=(\S+)`).FindStringSubmatch(unit)[1]
		if !slices.ContainsFunc(c.Env, func(e struct{ Name, Value string }) bool { return e.Name == "GOMEMLIMIT" && e.Value == limit }) {
			t.Errorf("container %s has %v, its unit GOMEMLIMIT=%s", c.Name, c.Env, limit)
		}
	}
}

// TestSchemaHasAllKeys checks that the schema and the default values have the same keys.
func TestSchemaHasAllKeys(t *testing.T) {
	var schema schema
	var values map[string]any
	for file, into := range map[string]any{"values.schema.json": &schema, "values.yaml": &values} {
		if err := yaml.Unmarshal([]byte(read(t, filepath.Join("fared", file))), into); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
	}
	delete(schema.Properties, "global") // of Helm
	want, got := keys(values, ""), schema.keys(schema.Definitions, "")
	if !slices.Equal(got, want) || len(got) < 40 {
		t.Errorf("the schema has\n%v\nand values.yaml\n%v", got, want)
	}
}

// TestObjectsHaveSchemas checks that the schemas of FaredNodeState and FaredDrain have the fields that fared-kube
// writes and reads, and no others: the API server drops unknown ones.
func TestObjectsHaveSchemas(t *testing.T) {
	for file, want := range map[string][]string{
		"farednodestate": prefixed("status", append(fields(reflect.TypeFor[nodestate.State](), ""), "written")),
		"fareddrain": slices.Concat(prefixed("spec", fields(reflect.TypeFor[kube.FaredDrainSpec](), "")),
			prefixed("status", fields(reflect.TypeFor[kube.FaredDrainStatus](), ""))),
	} {
		var crd struct {
			Versions []struct {
				Schema struct {
					Schema schema `yaml:"openAPIV3Schema"`
				}
			}
		}
		if err := yaml.Unmarshal([]byte(read(t, "fared/files/"+file+".yaml")), &crd); err != nil {
			t.Fatal(err)
		}
		got := crd.Versions[0].Schema.Schema.all("")
		slices.Sort(want)
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("the schema of %s has\n%v\nand the program\n%v", file, got, want)
		}
	}
}

// prefixed returns a field and the paths below it.
func prefixed(field string, paths []string) []string {
	all := []string{field}
	for _, path := range paths {
		all = append(all, field+"."+path)
	}
	return all
}

// fields returns the paths of a type's JSON.
func fields(of reflect.Type, path string) (all []string) {
	if of.Kind() == reflect.Slice {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct { // a time is a pointer to one
		return nil
	}
	for i := range of.NumField() {
		if f := of.Field(i); f.IsExported() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			all = append(append(all, path+name), fields(f.Type, path+name+".")...)
		}
	}
	return all
}

// all returns the paths of all properties.
func (s *schema) all(path string) (paths []string) {
	for s.Items != nil {
		s = s.Items
	}
	for name, child := range s.Properties {
		paths = append(append(paths, path+name), child.all(path+name+".")...)
	}
	return paths
}

// schema is the part of a JSON schema that the test reads.
type schema struct {
	Properties  map[string]*schema
	Definitions map[string]*schema
	Items       *schema
	Ref         string `yaml:"$ref"`
	Open        any    `yaml:"additionalProperties"`
}

// resolve follows a reference.
func (s *schema) resolve(definitions map[string]*schema) *schema {
	if name, ok := strings.CutPrefix(s.Ref, "#/definitions/"); ok {
		return definitions[name]
	}
	return s
}

// keys returns the sorted paths of all properties that exclude others.
func (s *schema) keys(definitions map[string]*schema, path string) (all []string) {
	for name, child := range s.Properties {
		all = append(all, path+name)
		if child = child.resolve(definitions); child.Open == false {
			all = append(all, child.keys(definitions, path+name+".")...)
		}
	}
	slices.Sort(all)
	return all
}

// keys returns the sorted paths of all values whose keys are the chart's. Those of resources are complete.
func keys(values map[string]any, path string) (all []string) {
	for name, value := range values {
		all = append(all, path+name)
		if inner, ok := value.(map[string]any); ok && name == "resources" {
			inner["limits"], inner["requests"] = nil, nil
		}
		if inner, ok := value.(map[string]any); ok && !open(name) {
			all = append(all, keys(inner, path+name+".")...)
		}
	}
	slices.Sort(all)
	return all
}

// open reports whether the keys of a value are the user's.
func open(name string) bool {
	return slices.Contains([]string{"common", "labels", "nodeSelector", "affinity", "nodes", "podLabels", "podAnnotations"}, name)
}
