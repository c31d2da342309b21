package config

import (
	"errors"
	"strings"
	"testing"
)

// mutations are mistakes on one line. They return the line unchanged where they do not apply.
var mutations = map[string]func(indent, body string) string{
	"one space more":     func(indent, body string) string { return indent + " " + body },
	"one space less":     func(indent, body string) string { return strings.TrimPrefix(indent, " ") + body },
	"a quote at the end": func(indent, body string) string { return indent + body + `"` },
	"a quote opened":     func(indent, body string) string { return indent + strings.Replace(body, ": ", `: "`, 1) },
	"a single quote":     func(indent, body string) string { return indent + strings.Replace(body, ": ", ": '", 1) },
	"a tab":              func(indent, body string) string { return indent + "\t" + body },
	"no colon":           func(indent, body string) string { return indent + strings.Replace(body, ": ", " ", 1) },
	"no space":           func(indent, body string) string { return indent + strings.Replace(body, ": ", ":", 1) },
	"a bracket opened":   func(indent, body string) string { return indent + strings.Replace(body, ": ", ": [", 1) },
	"a brace not closed": func(indent, body string) string { return indent + strings.Replace(body, "}", "", 1) },
	"a key twice":        func(indent, body string) string { return indent + body + "\n" + indent + body },
	"a number as text":   func(indent, body string) string { return indent + strings.Replace(body, "as: 42", "as: x42", 1) },
	"a wrong unit":       func(indent, body string) string { return indent + strings.Replace(body, "9s", "9parsecs", 1) },
}

// TestMistakesAreFoundOnTheirLine checks that, for mistakes on any line of the examples that make a file invalid, the
// first error names the line of the mistake.
func TestMistakesAreFoundOnTheirLine(t *testing.T) {
	tried := 0
	for _, name := range []string{"server-8gpu", "leaf"} {
		lines := strings.Split(string(read(t, "../../examples/"+name+".yaml")), "\n")
		for i, line := range lines {
			body := strings.TrimLeft(line, " ")
			if body == "" || body[0] == '#' {
				continue
			}
			for kind, mutate := range mutations {
				changed := append([]string{}, lines...)
				if changed[i] = mutate(line[:len(line)-len(body)], body); changed[i] == line {
					continue
				}
				_, err := Parse("f", []byte(strings.Join(changed, "\n")))
				var list Errors
				if !errors.As(err, &list) || !strings.Contains(list[0].Wrong, "is not YAML") {
					continue // valid, or an error in the meaning of a key
				}
				tried++
				if got := list[0].Line; got != i+1 {
					t.Errorf("%s.yaml, line %d, %s: %q: %v", name, i+1, kind, changed[i], list[0])
				}
			}
		}
	}
	if tried < 100 {
		t.Errorf("%d mistakes were tried", tried)
	}
	t.Logf("%d mistakes that YAML refuses", tried)
}
