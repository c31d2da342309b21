package config

import (
	"fmt"
	"reflect"
	"strings"
	"sync"

	"github.com/fared/fared/daemon/config/internal/model"
	"github.com/fared/fared/internal/spelling"
)

// suggest says which key was meant by an unknown one: a near one of the same object, or the same one of another object.
func suggest(fields []model.Field, key string) string {
	best, least := "", 2+len(key)/4
	for _, f := range fields {
		d := spelling.Distance(key, f.Key, least)
		if d > 0 && len(key) > 2 && (strings.HasPrefix(f.Key, key) || strings.HasPrefix(key, f.Key)) {
			d = 1
		}
		if d < least && d < len(f.Key) {
			best, least = f.Key, d
		}
	}
	if best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	if home, ok := homes()[key]; ok {
		return "it belongs in " + home
	}
	return "use " + model.OneOf(keys(fields))
}

// homes maps each key to the objects that have it, as a path without indexes.
var homes = sync.OnceValue(func() map[string]string {
	out := map[string]string{}
	var walk func(t reflect.Type, path string)
	walk = func(t reflect.Type, path string) {
		for _, f := range model.Fields(t) {
			home := path
			if home == "" {
				home = "the top level"
			}
			if at, ok := out[f.Key]; ok {
				home = at + " or " + home
			}
			out[f.Key] = home
			if f.Object != nil {
				down := join(path, f.Key)
				if f.List {
					down += "[]"
				}
				walk(f.Object, down)
			}
		}
	}
	walk(reflect.TypeFor[Config](), "")
	return out
})
