package model

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/fared/fared/fare"
)

// Problem describes a wrong value and its remedy.
type Problem struct{ Wrong, Right string }

// Scalar is the syntax of one Go type.
type Scalar struct {
	Name    string   // for display: "duration"
	JSON    string   // string, integer or boolean
	Pattern string   // of a string; necessary, not always sufficient
	Words   []string // of an enumeration
	Unit    string
	// Parse sets v, whose type is the scalar's, from the text of a YAML scalar.
	Parse func(text string, v reflect.Value) *Problem
	// Format is the inverse of Parse.
	Format func(v reflect.Value) string
	// Compare orders two values; nil if the type has no order for a range.
	Compare func(a, b reflect.Value) int
}

var (
	typeAddr      = reflect.TypeFor[netip.Addr]()
	typePrefix    = reflect.TypeFor[netip.Prefix]()
	typeDuration  = reflect.TypeFor[time.Duration]()
	typeBandwidth = reflect.TypeFor[fare.Bandwidth]()
	typeLevel     = reflect.TypeFor[slog.Level]()
	typeFileMode  = reflect.TypeFor[os.FileMode]()
)

// scalarOf returns the syntax of type t, or nil if it is not a scalar. words is the enum tag of a string.
func scalarOf(t reflect.Type, words string) *Scalar {
	if s := enumOf(t); s != nil {
		return s
	}
	switch t {
	case typeAddr:
		return addrScalar
	case typePrefix:
		return prefixScalar
	case typeDuration:
		return durationScalar
	case typeBandwidth:
		return bandwidthScalar
	case typeFileMode:
		return modeScalar
	}
	switch t.Kind() {
	case reflect.String:
		if words != "" {
			return wordScalar(strings.Split(words, ","), func(v reflect.Value) string { return v.String() },
				func(v reflect.Value, i int, word string) { v.SetString(word) })
		}
		return stringScalar
	case reflect.Bool:
		return boolScalar
	case reflect.Int64:
		return sizeScalar
	case reflect.Int, reflect.Uint16, reflect.Uint32:
		return intScalar
	case reflect.Uint8:
		return byteScalar
	}
	return nil
}

// Show quotes at most 40 characters of a value for a message, on one line.
func Show(text string) string {
	plain := text != ""
	for i, r := range text {
		if i >= 40 {
			return strconv.Quote(text[:i]) + "..."
		}
		plain = plain && unicode.IsPrint(r) && r != ' ' && r != '"' && r != ','
	}
	if plain {
		return text
	}
	return strconv.Quote(text)
}

var stringScalar = &Scalar{
	Name: "text", JSON: "string",
	Parse: func(text string, v reflect.Value) *Problem {
		if text == "" {
			return &Problem{"is empty", "write a value or remove the key"}
		}
		for _, r := range text {
			if !unicode.IsPrint(r) {
				return &Problem{Show(text) + " holds a character that cannot be printed", "remove it"}
			}
		}
		v.SetString(text)
		return nil
	},
	Format: func(v reflect.Value) string { return v.String() },
}

var boolScalar = &Scalar{
	Name: "true or false", JSON: "boolean",
	Parse: func(text string, v reflect.Value) *Problem {
		if text != "true" && text != "false" {
			return &Problem{Show(text) + " is neither true nor false", "use true or false"}
		}
		v.SetBool(text == "true")
		return nil
	},
	Format: func(v reflect.Value) string { return strconv.FormatBool(v.Bool()) },
}

var intScalar = &Scalar{
	Name: "integer", JSON: "integer",
	Parse:   parseInteger(10),
	Format:  func(v reflect.Value) string { return fmt.Sprint(v.Interface()) },
	Compare: compareIntegers,
}

var byteScalar = &Scalar{
	Name: "byte", JSON: "integer",
	Parse:   parseInteger(16),
	Format:  func(v reflect.Value) string { return fmt.Sprintf("0x%02x", v.Uint()) },
	Compare: compareIntegers,
}

// parseInteger parses decimal integers without leading zeros, whose base differs between YAML versions, and hexadecimal
// ones with 0x if base is 16.
func parseInteger(base int) func(string, reflect.Value) *Problem {
	return func(text string, v reflect.Value) *Problem {
		digits, b := text, 10
		if rest, ok := strings.CutPrefix(text, "0x"); ok && base == 16 {
			digits, b = rest, 16
		} else if len(text) > 1 && text[0] == '0' {
			return &Problem{Show(text) + " starts with a zero", "use a decimal integer without leading zeros"}
		}
		n, err := strconv.ParseInt(digits, b, 64)
		switch {
		case errors.Is(err, strconv.ErrRange):
			return &Problem{Show(text) + " is too large", "use a smaller integer"}
		case err != nil || digits[0] == '+' || text == "-0":
			return &Problem{Show(text) + " is not an integer", "use an integer such as 10"}
		case v.CanInt():
			if v.OverflowInt(n) {
				return &Problem{Show(text) + " is too large", "use a smaller integer"}
			}
			v.SetInt(n)
		case n < 0 || v.OverflowUint(uint64(n)):
			return &Problem{Show(text) + " is out of range", fmt.Sprintf("use 0 to %d", uint64(1)<<v.Type().Bits()-1)}
		default:
			v.SetUint(uint64(n))
		}
		return nil
	}
}

func compareIntegers(a, b reflect.Value) int {
	if a.CanInt() {
		return cmp.Compare(a.Int(), b.Int())
	}
	return cmp.Compare(a.Uint(), b.Uint())
}

var durationScalar = &Scalar{
	Name: "duration", JSON: "string", Unit: "ms, s, m, h", Pattern: `^-?([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`,
	Parse: func(text string, v reflect.Value) *Problem {
		if number.MatchString(text) {
			return &Problem{Show(text) + " has no unit", fmt.Sprintf("write %ss for seconds, or use ms, m, h", text)}
		}
		d, err := time.ParseDuration(text)
		if err != nil || text[0] == '+' || text[0] == '.' {
			return &Problem{Show(text) + " is not a duration", "use a number with a unit of ms, s, m or h, such as 1s"}
		}
		v.SetInt(int64(d))
		return nil
	},
	Format: func(v reflect.Value) string {
		text := time.Duration(v.Int()).String()
		if strings.HasSuffix(text, "m0s") {
			text = text[:len(text)-2]
		}
		if strings.HasSuffix(text, "h0m") {
			text = text[:len(text)-2]
		}
		return text
	},
	Compare: compareIntegers,
}

var number = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?$`)

var bandwidthScalar = &Scalar{
	Name: "bandwidth", JSON: "string", Unit: "bit/s", Pattern: `^[0-9]+(\.[0-9]+)? ?([kKMGTP](bps|bit/s)?|bps|bit/s)$`,
	Parse: func(text string, v reflect.Value) *Problem {
		if number.MatchString(text) {
			return &Problem{Show(text) + " has no unit", fmt.Sprintf("write %sG for Gbit/s, or use M, T", text)}
		}
		b, err := fare.ParseBandwidth(text)
		if err != nil {
			return &Problem{Show(text) + " is not a bandwidth", fmt.Sprintf("use whole bit/s up to %s with a unit, such as 400G or 1.6T",
				fare.MaxBandwidth)}
		}
		if b == 0 {
			return &Problem{Show(text) + " is not a positive bandwidth", "use more than zero, such as 400G, or remove the key"}
		}
		v.SetUint(uint64(b))
		return nil
	},
	Format: func(v reflect.Value) string {
		text := fare.Bandwidth(v.Uint()).String()
		if number.MatchString(text) {
			text += "bit/s"
		}
		return text
	},
	Compare: compareIntegers,
}

var addrScalar = &Scalar{
	Name: "IP address", JSON: "string",
	Parse: func(text string, v reflect.Value) *Problem {
		a, err := netip.ParseAddr(text)
		if err != nil {
			if p, err := netip.ParsePrefix(text); err == nil {
				return &Problem{Show(text) + " is a prefix", "use the address alone: " + p.Addr().String()}
			}
			return &Problem{Show(text) + " is not an IP address", "use one such as 192.0.2.1 or 2001:db8::1"}
		}
		v.Set(reflect.ValueOf(a))
		return nil
	},
	Format: func(v reflect.Value) string { return v.Interface().(netip.Addr).String() },
}

var prefixScalar = &Scalar{
	Name: "IP prefix", JSON: "string", Pattern: `^[0-9A-Fa-f:.]+/[0-9]+$`,
	Parse: func(text string, v reflect.Value) *Problem {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
				return &Problem{Show(text) + " has no prefix length", fmt.Sprintf("write %s/%d for one address", a, a.BitLen())}
			}
			return &Problem{Show(text) + " is not an IP prefix", "use one such as 192.0.2.1/32 or 2001:db8::/64"}
		}
		v.Set(reflect.ValueOf(p))
		return nil
	},
	Format: func(v reflect.Value) string { return v.Interface().(netip.Prefix).String() },
}

var modeScalar = &Scalar{
	Name: "permissions", JSON: "string", Unit: "octal", Pattern: `^0[0-7]{3}$`,
	Parse: func(text string, v reflect.Value) *Problem {
		m, err := strconv.ParseUint(text, 8, 32)
		if err != nil || len(text) != 4 || text[0] != '0' {
			return &Problem{Show(text) + " is not a file mode", `use four octal digits in quotes, such as "0660"`}
		}
		v.SetUint(m)
		return nil
	},
	Format:  func(v reflect.Value) string { return fmt.Sprintf("%04o", v.Uint()) },
	Compare: compareIntegers,
}

var sizeUnits = []struct {
	name  string
	shift uint
}{{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}}

var sizeScalar = &Scalar{
	Name: "size", JSON: "string", Unit: "bytes", Pattern: `^[0-9]+[KMGT]iB$`,
	Parse: func(text string, v reflect.Value) *Problem {
		if number.MatchString(text) {
			return &Problem{Show(text) + " has no unit", "use KiB, MiB, GiB or TiB, such as 64MiB"}
		}
		for _, u := range sizeUnits {
			if digits, ok := strings.CutSuffix(text, u.name); ok {
				n, err := strconv.ParseUint(digits, 10, 63-int(u.shift))
				if err != nil {
					break
				}
				v.SetInt(int64(n << u.shift))
				return nil
			}
		}
		return &Problem{Show(text) + " is not a size", "use a whole number with a unit of KiB, MiB, GiB or TiB, such as 64MiB"}
	},
	Format: func(v reflect.Value) string {
		n := v.Int()
		for _, u := range sizeUnits {
			if n != 0 && n%(1<<u.shift) == 0 {
				return fmt.Sprintf("%d%s", n>>u.shift, u.name)
			}
		}
		return fmt.Sprintf("%dKiB", n>>10)
	},
	Compare: compareIntegers,
}
