package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/config/internal/model"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/netnstest"
)

const root = "../../../.."

// TestFresh fails when a generated file differs from the output for the current types and examples.
func TestFresh(t *testing.T) {
	files, err := generate(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 3 {
		t.Fatalf("%d generated files, want 3", len(files))
	}
	for _, f := range files {
		have, err := os.ReadFile(filepath.Join(root, f.name))
		if err != nil {
			t.Error(err)
		} else if !bytes.Equal(have, f.content) {
			t.Errorf("%s is stale: run go generate ./daemon/config", f.name)
		}
	}
}

// TestManPageIsComplete checks that groff formats the manual page without a warning, and that the result has every key
// of the schema.
func TestManPageIsComplete(t *testing.T) {
	netnstest.Require(t, "groff")
	cmd := exec.Command("groff", "-man", "-Tascii", "-ww", "-P-cbou", "-rLL=400n", filepath.Join(root, manFile))
	var problems strings.Builder
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil || problems.Len() > 0 {
		t.Fatalf("%v: %v\n%s", cmd, err, &problems)
	}
	text := strings.Join(strings.Fields(string(out)), " ")
	keys := 0
	all := committed(t)
	objects := []any{all}
	for _, o := range all["$defs"].(map[string]any) {
		objects = append(objects, o)
	}
	for _, o := range objects {
		for key := range o.(map[string]any)["properties"].(map[string]any) {
			if keys++; !strings.Contains(text, " "+key+" (") {
				t.Errorf("fared.yaml(5) lacks %s", key)
			}
		}
	}
	if keys < 60 {
		t.Errorf("only %d keys were looked for", keys)
	}
}

// committed is the committed schema, decoded as plain JSON.
func committed(t *testing.T) map[string]any {
	t.Helper()
	var s map[string]any
	text, err := os.ReadFile(filepath.Join(root, schemaFile))
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// follow resolves a $ref.
func follow(root, s map[string]any) map[string]any {
	if ref, ok := s["$ref"].(string); ok {
		return root["$defs"].(map[string]any)[definition(ref)].(map[string]any)
	}
	return s
}

// TestDecoderAgrees checks that the decoder knows every key of the schema, and the schema every key of the decoder.
func TestDecoderAgrees(t *testing.T) {
	all := committed(t)
	keys := 0
	var walk func(s map[string]any, typ reflect.Type, path string)
	walk = func(s map[string]any, typ reflect.Type, path string) {
		if s["additionalProperties"] != false {
			t.Errorf("%s: the schema allows unknown keys", path)
		}
		properties := s["properties"].(map[string]any)
		fields := model.Fields(typ)
		if len(fields) != len(properties) {
			t.Errorf("%s: %d keys in the schema, %d in the decoder", path, len(properties), len(fields))
		}
		for _, f := range fields {
			keys++
			where := strings.TrimPrefix(path+"."+f.Key, ".")
			p, ok := properties[f.Key].(map[string]any)
			if !ok {
				t.Errorf("%s is not in the schema", where)
				continue
			}
			if !known(t, where) {
				t.Errorf("%s is in the schema, but the decoder does not know it", where)
			}
			if f.Object != nil {
				if f.List {
					p, where = p["items"].(map[string]any), where+"[]"
				}
				walk(follow(all, p), f.Object, where)
			}
		}
	}
	walk(all, reflect.TypeFor[config.Config](), "")
	if keys < 60 {
		t.Errorf("only %d keys were looked at", keys)
	}
	if known(t, "bgp.nonsense") || known(t, "planes[].sub_ports[].sessions[].nonsense") {
		t.Error("the decoder knows everything")
	}
}

// known writes a file with one key and reports whether the decoder knows the key. path is like
// planes[].sub_ports[].device.
func known(t *testing.T, path string) bool {
	t.Helper()
	text, end := "", ""
	for _, key := range strings.Split(path, ".") {
		if list, ok := strings.CutSuffix(key, "[]"); ok {
			text, end = text+"{"+list+": [", "]}"+end
		} else {
			text, end = text+"{"+key+": ", "}"+end
		}
	}
	_, err := config.Parse("known", []byte(text+"x"+end))
	if err == nil {
		t.Fatalf("%s alone is a configuration", path)
	}
	return !strings.Contains(err.Error(), "is not a known key")
}

// TestDefaultsAgree compares the schema's defaults with the resolved values of absent keys.
func TestDefaultsAgree(t *testing.T) {
	const minimal = "as: 65001\nrouter_id: 10.255.0.1\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\nplanes:\n- name: p0\n  sub_ports:\n" +
		"  - device: eth0\n    sessions: [{peer: 10.0.0.0}]\n"
	c, err := config.Parse("minimal", []byte(minimal))
	if err != nil {
		t.Fatal(err)
	}
	all := committed(t)
	compared := 0
	var walk func(s map[string]any, v reflect.Value, path string)
	walk = func(s map[string]any, v reflect.Value, path string) {
		for _, f := range model.Fields(v.Type()) {
			p, fv, where := s["properties"].(map[string]any)[f.Key].(map[string]any), v.Field(f.Index), path+"."+f.Key
			switch want, has := p["default"]; {
			case f.Object != nil && f.List && fv.Len() == 0:
			case f.Object != nil && f.List:
				walk(follow(all, p["items"].(map[string]any)), fv.Index(0), where)
			case f.Object != nil && !f.Optional:
				walk(follow(all, p), fv, where)
			case f.Object != nil || f.Required || f.Derived != "":
			case strings.Contains(minimal, f.Key+":"):
			case has:
				compared++
				if got := asJSON(&f, fv); !reflect.DeepEqual(got, want) {
					t.Errorf("%s is %v, the schema says %v", where, got, want)
				}
			case !fv.IsZero():
				t.Errorf("%s is %v, the schema has no default", where, fv)
			}
		}
	}
	walk(all, reflect.ValueOf(c).Elem(), "")
	if compared < 25 {
		t.Errorf("only %d defaults were compared", compared)
	}
	if c.PathBandwidth.FAREType != fare.DefaultFAREType || c.PathBandwidth.FARESubType != fare.DefaultFARESubType {
		t.Errorf("code point 0x%02x 0x%02x, fare's is 0x%02x 0x%02x", c.PathBandwidth.FAREType, c.PathBandwidth.FARESubType,
			fare.DefaultFAREType, fare.DefaultFARESubType)
	}
}

// asJSON returns a resolved value as decoded JSON.
func asJSON(f *model.Field, v reflect.Value) any {
	if f.List {
		out := make([]any, v.Len())
		for i := range out {
			out[i] = oneJSON(f, v.Index(i))
		}
		return out
	}
	return oneJSON(f, v)
}

func oneJSON(f *model.Field, v reflect.Value) any {
	switch {
	case f.Scalar.JSON == "boolean":
		return v.Bool()
	case f.Scalar.JSON == "integer" && v.CanInt():
		return float64(v.Int())
	case f.Scalar.JSON == "integer":
		return float64(v.Uint())
	}
	return f.Scalar.Format(v)
}

// TestSchemaAccepts checks the schema against the files that the decoder accepts, and against mistakes of each kind.
func TestSchemaAccepts(t *testing.T) {
	all := committed(t)
	var names []string
	for _, pattern := range []string{root + "/examples/*.yaml", "../../testdata/good/*.yaml"} {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) < 2 {
			t.Fatalf("%s matches %v (%v)", pattern, found, err)
		}
		names = append(names, found...)
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := config.Parse(name, text); err != nil {
			t.Error(err)
		}
		if bad := check(t, all, string(text)); len(bad) > 0 {
			t.Errorf("%s: the schema refuses %v", name, bad)
		}
	}
	for text, want := range map[string]string{
		"as: 5\naccept: [10.0.0.0/8]":                                "planes is missing",
		"as: 5\naccept: []\nplanes: [{}]":                            "accept has 0 elements",
		"as: 0\naccept: [a]\nplanes: []":                             "accept[0]",
		"as: 5\naccept: [10.0.0.0/8]\nplanes: [{}]\nrole: spine":     "role",
		"as: 5\naccept: [10.0.0.0/8]\nplanes: [{}]\nbgp: {a: 1}":     "bgp.a is unknown",
		"as: five\naccept: [10.0.0.0/8]\nplanes: [{}]\n":             "as is not a integer",
		"as: 5\naccept: [10.0.0.0/8]\nplanes: [{}]\ndrain_delay: 5":  "drain_delay",
		"as: 5\naccept: [10.0.0.0/8]\nplanes: [{}]\ndrain_delay: 5x": "drain_delay",
	} {
		if bad := check(t, all, text); !strings.Contains(strings.Join(bad, "\n"), want) {
			t.Errorf("%q: the schema says %q, want %q", text, bad, want)
		}
	}
}

// check implements the part of JSON schema that the generated schema uses; it returns the mistake, if any.
func check(t *testing.T, all map[string]any, text string) []string {
	t.Helper()
	var doc any
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(doc)
	if err == nil {
		err = json.Unmarshal(raw, &doc)
	}
	if err != nil {
		t.Fatal(err)
	}
	var bad []string
	refuse := func(format string, args ...any) {
		bad = append(bad, strings.TrimPrefix(fmt.Sprintf(format, args...), "."))
	}
	var walk func(s map[string]any, v any, path string)
	walk = func(s map[string]any, v any, path string) {
		s = follow(all, s)
		fits := map[string]bool{}
		switch v := v.(type) {
		case map[string]any:
			fits["object"] = true
			properties, _ := s["properties"].(map[string]any)
			for key, value := range v {
				if p, ok := properties[key].(map[string]any); ok {
					walk(p, value, path+"."+key)
				} else if s["additionalProperties"] == false {
					refuse("%s.%s is unknown", path, key)
				}
			}
			required, _ := s["required"].([]any)
			for _, key := range required {
				if _, ok := v[key.(string)]; !ok {
					refuse("%s.%s is missing", path, key)
				}
			}
		case []any:
			fits["array"] = true
			least, _ := s["minItems"].(float64)
			most, bounded := s["maxItems"].(float64)
			if n := float64(len(v)); n < least || bounded && n > most {
				refuse("%s has %d elements", path, len(v))
			}
			if items, ok := s["items"].(map[string]any); ok {
				for i := range v {
					walk(items, v[i], fmt.Sprintf("%s[%d]", path, i))
				}
			}
		case string:
			fits["string"] = true
			if pattern, ok := s["pattern"].(string); ok && !regexp.MustCompile(pattern).MatchString(v) {
				refuse("%s does not match %s", path, pattern)
			}
			if words, ok := s["enum"].([]any); ok && !slices.Contains(words, any(v)) {
				refuse("%s is none of %v", path, words)
			}
		case float64:
			fits["integer"] = v == float64(int64(v))
			least, hasLeast := s["minimum"].(float64)
			most, hasMost := s["maximum"].(float64)
			if hasLeast && v < least || hasMost && v > most {
				refuse("%s is out of range", path)
			}
		case bool:
			fits["boolean"] = true
		}
		if want, ok := s["type"].(string); ok && !fits[want] {
			refuse("%s is not a %s", path, want)
		}
	}
	walk(all, doc, "")
	return bad
}
