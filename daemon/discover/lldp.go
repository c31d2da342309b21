package discover

import (
	"context"
	"encoding/json"
	"os/exec"
	"time"
)

// lldpPatience is the time for an answer of lldpd.
const lldpPatience = 3 * time.Second

// lldpNeighbors returns the neighbors by device, as lldpd reports them. Without lldpd, or without the right to query
// it, there are none.
func lldpNeighbors(ctx context.Context) map[string]Neighbor {
	ctx, cancel := context.WithTimeout(ctx, lldpPatience)
	defer cancel()
	out, err := exec.CommandContext(ctx, "lldpctl", "-f", "json0").Output()
	if err != nil {
		return nil
	}
	return parseLLDP(out)
}

// lldpValue is a leaf of lldpctl's output, which has a list even of a single value.
type lldpValue []struct {
	Value string `json:"value"`
}

func (v lldpValue) first() string {
	if len(v) == 0 {
		return ""
	}
	return v[0].Value
}

// parseLLDP reads the output of `lldpctl -f json0`. A device with several neighbors, or with none that has a name, is
// omitted: its cable does not lead to one leaf. Malformed output has no neighbors.
func parseLLDP(out []byte) map[string]Neighbor {
	var all struct {
		LLDP []struct {
			Interface []struct {
				Name    string `json:"name"`
				Chassis []struct {
					Name lldpValue `json:"name"`
				} `json:"chassis"`
				Port []struct {
					ID lldpValue `json:"id"`
				} `json:"port"`
			} `json:"interface"`
		} `json:"lldp"`
	}
	if json.Unmarshal(out, &all) != nil {
		return nil
	}
	found, seen := map[string]Neighbor{}, map[string]int{}
	for _, l := range all.LLDP {
		for _, i := range l.Interface {
			if seen[i.Name]++; len(i.Chassis) == 0 || i.Chassis[0].Name.first() == "" {
				continue
			}
			n := Neighbor{System: i.Chassis[0].Name.first()}
			if len(i.Port) > 0 {
				n.Port = i.Port[0].ID.first()
			}
			found[i.Name] = n
		}
	}
	for name, n := range seen {
		if n > 1 {
			delete(found, name)
		}
	}
	return found
}
