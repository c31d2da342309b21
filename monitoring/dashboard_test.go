package monitoring

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// board is the part of the dashboard that the tests read.
type board struct {
	Panels []struct {
		ID          int
		Type, Title string
		GridPos     struct{ X, Y, W, H int }
		FieldConfig struct{ Defaults struct{ Unit string } }
		Targets     []struct{ RefID, Expr, LegendFormat string }
	}
}

func readBoard(t *testing.T) (out board) {
	t.Helper()
	b, err := os.ReadFile("fared.dashboard.json")
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(out.Panels) < 20 {
		t.Fatalf("%d panels", len(out.Panels))
	}
	return out
}

// units are those of Grafana's units that the dashboard uses, from its list of identifiers.
var units = []string{"short", "percentunit", "bps", "pps", "ops", "cps", "s", "bytes"}

// TestDashboardGrid checks that panels have separate places within 24 columns, separate numbers, a unit, and queries
// with separate names.
func TestDashboardGrid(t *testing.T) {
	taken, ids := map[[2]int]string{}, map[int]bool{}
	for _, p := range readBoard(t).Panels {
		if ids[p.ID] || p.ID == 0 {
			t.Errorf("%s has the number %d of another panel", p.Title, p.ID)
		}
		ids[p.ID] = true
		g := p.GridPos
		if g.X < 0 || g.W < 1 || g.X+g.W > 24 || g.H < 1 {
			t.Errorf("%s is at %+v", p.Title, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other, ok := taken[[2]int{x, y}]; ok {
					t.Fatalf("%s covers %s", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if !slices.Contains(units, p.FieldConfig.Defaults.Unit) || len(p.Targets) == 0 {
			t.Errorf("%s has unit %q and %d queries", p.Title, p.FieldConfig.Defaults.Unit, len(p.Targets))
		}
		names := map[string]bool{}
		for _, q := range p.Targets {
			if names[q.RefID] {
				t.Errorf("%s has two queries %s", p.Title, q.RefID)
			}
			names[q.RefID] = true
		}
	}
}

var label = regexp.MustCompile(`\{\{(\w+)\}\}`)

// TestDashboardQueries checks that promtool parses every query, that its metrics are exported, and that it selects by
// the variable instance.
func TestDashboardQueries(t *testing.T) {
	exported := series()
	var recorded []map[string]string
	for _, p := range readBoard(t).Panels {
		for _, q := range p.Targets {
			for _, name := range metricName.FindAllString(q.Expr, -1) {
				if !exported[name] {
					t.Errorf("%s: no time series %s is exported", p.Title, name)
				}
			}
			if !strings.Contains(q.Expr, `instance=~"$instance"`) {
				t.Errorf("%s does not select by instance: %s", p.Title, q.Expr)
			}
			recorded = append(recorded, map[string]string{
				"record": fmt.Sprintf("panel:%d:%s", p.ID, q.RefID), "expr": strings.NewReplacer("$__rate_interval", "1m", "$instance", ".*").Replace(q.Expr),
			})
			for _, m := range label.FindAllStringSubmatch(q.LegendFormat, -1) {
				if by := regexp.MustCompile(`by \([^)]*\b` + m[1] + `\b`); strings.Contains(q.Expr, "sum") && !by.MatchString(q.Expr) {
					t.Errorf("%s: the legend has the label %s, which the query removes", p.Title, m[1])
				}
			}
		}
	}
	b, err := yaml.Marshal(map[string]any{"groups": []map[string]any{{"name": "panels", "rules": recorded}}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "panels.yml")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "check", "rules", file)
}
