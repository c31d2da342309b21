// Package locate finds the parts of a fabric that are at fault, from the views of its nodes. It is pure: it has no
// goroutine, socket or clock.
//
// # Hard faults
//
// A node reports each of its cables as up, dark (no carrier) or silent (a carrier and no session). A part that fails
// takes all of its cables with it, so the faults are the fewest parts that cover the failed cables. A part costs 1, and
// each cable of it that is up costs contradiction: a leaf is named although one report is late, and not because a third
// of its cables have failed. Cables without a report contradict nothing. The cheapest cover is approached greedily.
//
// Servers do not see uplinks. Where leaves do not report, the bandwidth that servers have learned counts: a leaf that
// has lost one of S uplinks has (S-1)/S of its bandwidth to and from all other leaves of its plane, a lost spine takes
// as much from all pairs of leaves. Which uplink or spine it is remains open, and all of them are named as
// alternatives. A server that does not report is judged by the bandwidth of the others toward it.
//
// # Loss
//
// A part with loss rate q that a share w of a pair's probes pass loses q*w*n of n. Losses of different causes add up,
// and are few: they have Poisson distributions with the mean (base + q*w)*n. For each candidate the likelihood of the
// best q is compared with that of q = 0. The logarithm of the ratio, less that of the number of candidates of the kind
// (a uniform prior; Occam's factor) and less odds, is its score. The best candidate with a positive score is named, its
// losses are expected from then on, and the search repeats. A cable's losses spread over its leaf have a lower
// likelihood than at the cable, and a leaf's losses need many cables, so the score finds the level without a rule.
// Candidates with the same evidence are alternatives: round trips alone do not tell a direction.
package locate
