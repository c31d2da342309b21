package peers

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestReport checks percentiles, ratios and files with figures that are known.
func TestReport(t *testing.T) {
	s := settings{contestants: []contestant{frr{}, bird{}, fared{driver: "linux"}}, out: t.TempDir()}
	r := newReport(s)
	x := row{name: "x", size: 7, figures: []figure{{"x", "an event", "ms", "event"}, {"x-cpu", "processor time of it", "ms", ""}}}
	r.begin(x)
	for i := range 100 {
		r.add("frr", samples{"x": {float64(100 - i)}}, false)
	}
	r.add("bird", samples{"x": {4, 8, 6}, "x-cpu": {3}}, false)
	r.add("fared-linux", samples{"x": {3}}, false)
	r.end(x)
	if err := r.finish(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(s.out, "bench-peers.json"))
	if err != nil {
		t.Fatal(err)
	}
	var got report
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]distribution{
		"frr":         {P50: 50, P99: 99, Min: 1, Max: 100, N: 100, Ratio: 50. / 6},
		"bird":        {P50: 6, P99: 8, Min: 4, Max: 8, N: 3, Ratio: 1},
		"fared-linux": {P50: 3, P99: 3, Min: 3, Max: 3, N: 1, Ratio: 0.5},
	} {
		if d := got.Figures[0].By[name]; d != want {
			t.Errorf("%s: %+v, want %+v", name, d, want)
		}
	}
	if f := got.Figures[0]; f.Key != "x" || f.Destinations != 7 || f.Unit != "ms" {
		t.Errorf("figure %+v", f)
	}
	drawn, err := os.ReadFile(filepath.Join(s.out, "bench-peers.svg"))
	if err != nil {
		t.Fatal(err)
	}
	dots := 0
	for d := xml.NewDecoder(strings.NewReader(string(drawn))); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "title" {
			dots++
		}
	}
	if dots != 3 { // the figure without a label is left out
		t.Errorf("%d medians are drawn, want 3", dots)
	}
	// With busy processes each contestant has two columns.
	s.busy = 1
	busy := newReport(s)
	busy.begin(x)
	busy.add("bird", samples{"x": {4, 8, 6}, "x-cpu": {3}}, false)
	busy.add("bird", samples{"x": {12}}, true)
	busy.end(x)
	if table := busy.table(); !strings.Contains(table, "| an event | ms | 3 | - | - | 6.00 (8.00) | 12.0 | - | - |") {
		t.Errorf("no idle and busy value of BIRD:\n%s", table)
	}
}

// TestSettings checks the choice of rows, contestants and sizes.
func TestSettings(t *testing.T) {
	env := map[string]string{"FARED_PEERS": "1", "FARED_PEERS_ROWS": "update,kill1", "FARED_PEERS_CONTESTANTS": "bird fared-inside", "FARED_PEERS_SIZES": "100,1", "FARED_PEERS_REPETITIONS": "3"}
	s, err := settingsOf(func(key string) string { return env[key] })
	if err != nil || s.repetitions != 3 || len(s.contestants) != 2 || s.contestants[1].name() != "fared-inside" || s.sizes[0] != 1 || s.sizes[1] != 100 {
		t.Errorf("settings %+v, %v", s, err)
	}
	var names []string
	for _, n := range s.sizes {
		for _, x := range rowsAt(n, s) {
			if selected(x.name, s.rows) {
				names = append(names, x.name)
			}
		}
	}
	if got := strings.Join(names, " "); got != "update1 kill1 update100" {
		t.Errorf("rows %s", got)
	}
	for key, wrong := range map[string]string{"ROWS": "upgrade", "CONTESTANTS": "cisco", "SIZES": "0", "REPETITIONS": "-1", "BUSY": "x", "FLAP": "5m"} {
		if s, err := settingsOf(func(k string) string { return map[string]string{"FARED_PEERS_" + key: wrong}[k] }); err == nil {
			t.Errorf("%s=%s is accepted: %+v", key, wrong, s)
		}
	}
}
