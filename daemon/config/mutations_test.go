package config

import (
	"errors"
	"fmt"
	"github.com/fared/fared/internal/testkit/gate"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// fault is a deliberate mistake in the text of a valid file.
type fault struct {
	kind   string
	text   string // the whole file with the mistake
	line   int    // line of the mistake, from 1
	column int    // column of the wrong key or value; 0 accepts every column of the line
	key    string // for an unknown key, the intended one
}

var (
	pair     = regexp.MustCompile(`([a-z_]+): ("[^"]*"|[^\s,{}\[\]"#]+)`) // a key and its scalar, in a block or between braces
	listItem = regexp.MustCompile(`^ *- ([^\s:{]+|"[^"]*"|[0-9a-f:]+/\d+)(\s+#.*)?$`)
	block    = regexp.MustCompile(`^( *)(?:- )?([a-z_]+):(\s+#.*)?$`) // a key that opens a block
	flow     = regexp.MustCompile(`([a-z_]+): (\[[^\]]*\])`)
	integer  = regexp.MustCompile(`^\d+$`)
	speed    = regexp.MustCompile(`^(\d+(?:\.\d+)?)[GT]$`)
	period   = regexp.MustCompile(`^(\d+)(ms|s|m|h)$`)
	address  = regexp.MustCompile(`^"?[0-9a-f]*[.:][0-9a-f:.]*"?$`)
)

// faults makes mistakes of type, unit, address, repetition, spelling and tabs on every line of a valid file. It uses
// only the text, no knowledge of YAML or the keys of a configuration.
func faults(text string) []fault {
	lines := strings.Split(text, "\n")
	var out []fault
	// put replaces the bytes from..to of line i, and counts added lines above the mistake.
	put := func(kind string, i, from, to int, by string, below int, column bool) *fault {
		changed := slices.Clone(lines)
		changed[i] = lines[i][:from] + by + lines[i][to:]
		f := fault{kind: kind, text: strings.Join(changed, "\n"), line: i + 1 + below}
		if column {
			f.column = from + 1
		}
		out = append(out, f)
		return &out[len(out)-1]
	}
	for i, line := range lines {
		code, _, _ := strings.Cut(line, " #")
		if code == "" || strings.HasPrefix(strings.TrimSpace(code), "#") {
			continue
		}
		inBraces := strings.Contains(code, "{")
		for _, m := range pair.FindAllStringSubmatchIndex(code, -1) {
			key, value := code[m[2]:m[3]], code[m[4]:m[5]]
			set := func(kind, by string) { put(kind, i, m[4], m[5], by, 0, true) }
			set("a list for a scalar", "[x]")
			set("a mapping for a scalar", "{x: y}")
			set("an anchor", "&a "+value)
			set("a tag", "!!str "+value)
			if !inBraces {
				put("no value", i, m[3]+1, len(line), "", 0, false)
			}
			switch {
			case integer.MatchString(value):
				set("text for a number", "many")
				set("a quoted number", `"`+value+`"`)
				set("a fraction for an integer", value+".5")
				set("a negative number", "-"+value)
				set("a unit for a number", value+"s")
			case speed.MatchString(value):
				n := speed.FindStringSubmatch(value)[1]
				for _, by := range []string{n, n + "X", n + "GB", "G" + n, "-" + n + "G", "0G", "fast"} {
					set("a speed "+by, by)
				}
			case period.MatchString(value):
				n := period.FindStringSubmatch(value)[1]
				for _, by := range []string{n, n + " parsecs", n + "d", "-" + n + "s", n + ",5s", "soon", "1000000h"} {
					set("a duration "+by, by)
				}
			case address.MatchString(value):
				for _, by := range []string{"300.0.0.1", "10.0.0", "leaf0", "10.0.0.1/31", `"fd00::g"`, "7"} {
					set("an address "+by, by)
				}
			case value == "true" || value == "false":
				for _, by := range []string{"yes", `"true"`, "1", "True"} {
					set("a boolean "+by, by)
				}
			default:
				set("a number for text", "5")
				set("a boolean for text", "true")
				set("a date for text", "2026-01-01")
			}
			if inBraces {
				put("a key twice between braces", i, m[5], m[5], ", "+code[m[0]:m[1]], 0, false).column = m[5] + 3
			} else {
				indent := strings.Repeat(" ", m[2])
				put("a key twice", i, len(line), len(line), "\n"+indent+code[m[2]:m[1]], 1, false).column = m[2] + 1
			}
			for kind, by := range misspelled(key) {
				put(kind, i, m[2], m[3], by, 0, true).key = key
			}
			if !inBraces {
				put("no space after the colon", i, m[3]+1, m[4], "", 0, false)
			}
		}
		if m := listItem.FindStringSubmatchIndex(code); m != nil {
			value := code[m[2]:m[3]]
			put("an item twice", i, len(line), len(line), "\n"+code, 1, false).column = m[2] + 1
			for _, by := range []string{strings.SplitN(value, "/", 2)[0], value + "0", "10.0.0.1/33", "many", "{x: y}", "[x]", "~", `"fd00::/200"`} {
				put("an item "+by, i, m[2], m[3], by, 0, true)
			}
		}
		for _, m := range flow.FindAllStringSubmatchIndex(code, -1) {
			put("a scalar for a list", i, m[4], m[5], "many", 0, true)
			put("a mapping for a list", i, m[4], m[5], "{x: y}", 0, true)
			first, _, _ := strings.Cut(code[m[4]+1:m[5]-1], ",")
			put("a list item twice", i, m[5]-1, m[5]-1, ", "+first, 0, false).column = m[5] + 2
		}
		if m := block.FindStringSubmatchIndex(code); m != nil {
			key, column, end := code[m[4]:m[5]], m[4], i+1
			for end < len(lines) && (strings.TrimSpace(lines[end]) == "" || indentOf(lines[end]) > column) {
				end++
			}
			for _, by := range []string{"many", "7", "true", ""} {
				changed := slices.Concat(lines[:i], []string{code + " " + by}, lines[end:])
				out = append(out, fault{kind: "a scalar for a block: " + by, text: strings.Join(changed, "\n"), line: i + 1})
			}
			changed := slices.Concat(lines[:i], []string{code + " [{x: y}]"}, lines[end:])
			out = append(out, fault{kind: "a list of strange objects for a block", text: strings.Join(changed, "\n"), line: i + 1})
			changed = slices.Concat(lines[:end], lines[i:end], lines[end:])
			if strings.HasPrefix(strings.TrimSpace(code), "- ") {
				out = append(out, fault{kind: "an element twice", text: strings.Join(changed, "\n"), line: end + 1})
			} else {
				out = append(out, fault{kind: "a block twice", text: strings.Join(changed, "\n"), line: end + 1, column: column + 1})
			}
			for kind, by := range misspelled(key) {
				put(kind, i, m[4], m[5], by, 0, true).key = key
			}
		}
		indent := indentOf(line)
		put("a tab before the line", i, 0, 0, "\t", 0, true)
		put("a tab in the indentation", i, 0, indent, "\t", 0, true)
		put("a tab after the indentation", i, indent, indent, "\t", 0, true)
		if rest, ok := strings.CutPrefix(line[indent:], "- "); ok && rest != "" {
			put("a tab after the dash", i, indent+1, indent+2, "\t", 0, false)
		}
	}
	return out
}

func indentOf(line string) int { return len(line) - len(strings.TrimLeft(line, " ")) }

// misspelled returns unknown keys that resemble a known one.
func misspelled(key string) map[string]string {
	out := map[string]string{"a letter more": key + "x", "another case": strings.ToUpper(key[:1]) + key[1:]}
	if len(key) > 3 {
		out["a letter less"] = key[:1] + key[2:]
		out["two letters swapped"] = key[:1] + key[2:3] + key[1:2] + key[3:]
		out["another separator"] = strings.ReplaceAll(key, "_", "-")
	}
	for kind, by := range out {
		if by == key {
			delete(out, kind)
		}
	}
	return out
}

// TestEveryErrorIsOnTheLineOfTheMistake checks that, for one mistake on one line, every error names that line (and
// column, where the mistake has one), has the documented form, and names the intended key.
func TestEveryErrorIsOnTheLineOfTheMistake(t *testing.T) {
	form := regexp.MustCompile(`^[^:]+:\d+:\d+: [^\s:]+: \S.*, \S.*$`)
	tried := map[string]int{}
	for name, every := range map[string]int{"server-8gpu": 1, "server-8gpu-own-ports": 10, "leaf": 1} {
		text := string(read(t, "../../examples/"+name+".yaml"))
		text = strings.NewReplacer("  - fd00:ff::8/128\n", "", `, "fd00:ff::8/128"`, "").Replace(text) // leave room for one more
		if from := strings.Index(text, "  - name: p1\n"); every > 1 {                                  // planes are alike: one is enough
			text = text[:from] + text[strings.Index(text, "\nweights:"):]
		}
		want := mustParse(t, text).Text()
		for i, f := range faults(text) {
			if i%(every*gate.Count(t, gate.Models, 3, 1)) != 0 {
				continue
			}
			c, err := Parse("f.yaml", []byte(f.text))
			if err == nil {
				if c.Text() != want { // a tab between tokens changes nothing
					t.Errorf("%s.yaml:%d:%d, %s: %q is accepted", name, f.line, f.column, f.kind, strings.Split(f.text, "\n")[f.line-1])
				}
				continue
			}
			tried[f.kind]++
			var list Errors
			if !errors.As(err, &list) {
				t.Fatalf("%s: %v", f.kind, err)
			}
			report := func(format string, args ...any) {
				t.Errorf("%s.yaml:%d:%d, %s: %q: %s\n%v", name, f.line, f.column, f.kind, strings.Split(f.text, "\n")[f.line-1], fmt.Sprintf(format, args...), err)
			}
			for _, line := range strings.Split(err.Error(), "\n") {
				if !form.MatchString(line) {
					report("%q has another form", line)
				}
			}
			for _, e := range list {
				if e.Line != f.line || f.column != 0 && e.Column != f.column {
					report("an error elsewhere")
					break
				}
			}
			if f.key != "" && !strings.Contains(list[0].Right, fmt.Sprintf("did you mean %q?", f.key)) {
				report("no suggestion")
			}
		}
	}
	total := 0
	for _, n := range tried {
		total += n
	}
	if total < 300 || len(tried) < 50 {
		t.Errorf("only %d mistakes of %d kinds", total, len(tried))
	}
	t.Logf("%d mistakes of %d kinds", total, len(tried))
}

func mustParse(t *testing.T, text string) *Config {
	t.Helper()
	c, err := Parse("valid", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}
