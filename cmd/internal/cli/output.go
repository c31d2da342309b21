package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/plainjson"
)

// Print writes a message in the requested format; table draws the table.
func (e *Env) Print(m proto.Message, table func(w *tabwriter.Writer)) error {
	if e.Output == "table" {
		w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
		table(w)
		return w.Flush()
	}
	return PrintJSON(e.Out, e.Output, plainjson.Append(nil, m.ProtoReflect()))
}

// PrintValue writes a value as JSON or YAML.
func (e *Env) PrintValue(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return PrintJSON(e.Out, e.Output, text)
}

// PrintJSON writes compact JSON indented, or as YAML with the same keys in the same order.
func PrintJSON(w io.Writer, format string, compact []byte) error {
	if format == "json" {
		var b bytes.Buffer
		if err := json.Indent(&b, compact, "", "  "); err != nil {
			return err
		}
		b.WriteByte('\n')
		_, err := w.Write(b.Bytes())
		return err
	}
	var node yaml.Node
	if err := yaml.Unmarshal(compact, &node); err != nil {
		return err
	}
	blockStyle(&node)
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(&node); err != nil {
		return err
	}
	return enc.Close()
}

// blockStyle removes the flow style and the quotes of JSON that was read as YAML; the encoder quotes only the values
// that would otherwise not be strings.
func blockStyle(n *yaml.Node) {
	n.Style &^= yaml.FlowStyle
	if n.Kind == yaml.ScalarNode {
		n.Style = 0
	}
	for _, c := range n.Content {
		blockStyle(c)
	}
}

// Bandwidth prints bit/s for people.
func Bandwidth(bps uint64) string {
	if bps == 0 {
		return "0"
	}
	return fare.Bandwidth(bps).String()
}

// Age prints a duration for people: two significant units at most.
func Age(ns uint64) string {
	d := time.Duration(ns)
	switch {
	case d >= 24*time.Hour:
		return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
	case d >= time.Hour:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	case d >= time.Minute:
		return fmt.Sprintf("%dm%ds", d/time.Minute, d%time.Minute/time.Second)
	case d >= time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	default:
		return d.Round(time.Microsecond).String()
	}
}

// Dash replaces an empty cell of a table.
func Dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// Row writes one tab-separated line.
func Row(w io.Writer, cells ...string) {
	fmt.Fprintln(w, strings.Join(cells, "\t"))
}

// YesNo writes a boolean for people.
func YesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// Several writes a count with its noun: 1 session, 2 sessions.
func Several(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
