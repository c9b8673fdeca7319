// Which drafts a window keeps. `window` holds the anchor and the drafts; verdict = {accepted drafts, token after them, kept rows, then the
// window itself}, 3 + SP_ROWS numbers: what the host is told by one copy.
//
// accept_greedy: drafts are kept while each is the argmax of the row before it. Grid 1, block 1. `best` is `[rows]`.
//   Bytes moved: (3 * drafts + 2) * 4 + 12.
// accept_sampled: draft d of row j is kept when u * q(d) < p(d); at the first rejection the token is drawn from max(p - q, 0)
//   normalised, without one from the last row's p. Grid 1, block 256, dynamic shared 256 * 8 + 32 bytes. `p` is `[rows, vocab]`, `q` is
//   `[drafts, vocab]`, or null when the drafts were not drawn: then q is 1 at the draft. `uniforms`: one a draft, then the token's.
//   Bytes moved: vocab * 8 * 2 * 2 (the deciding row's p and q, once for the total and once for the parts).
// advance: adds the kept rows to the timeline's position and makes the new token the next window's anchor. Grid 1, block 1.
// Reference: engine::verify.
#include "sp_cdf.cuh"

SP_DEVICE void sp_verdict(const u32* window, int drafts, int accepted, int next, int* verdict) {
    verdict[0] = accepted;
    verdict[1] = next;
    verdict[2] = accepted + 1;
    for (int i = 0; i <= drafts && i < SP_ROWS; i++) verdict[3 + i] = (int)window[i];
}

extern "C" __global__ void __launch_bounds__(32)
accept_greedy(const u32* window, const u32* best, int drafts, int* verdict) {
    if (threadIdx.x != 0) return;
    int accepted = 0;
    while (accepted < drafts && window[accepted + 1] == best[accepted]) accepted++;
    sp_verdict(window, drafts, accepted, (int)best[accepted], verdict);
}

// A probability of q; what is none counts as 0.
SP_DEVICE double sp_sane(double q) { return q >= 0.0 && q <= 1.0 ? q : 0.0; }

extern "C" __global__ void __launch_bounds__(256)
accept_sampled(const u32* window, const double* p, const double* q, const double* uniforms, int drafts, int vocab, int* verdict) {
    SP_DYNAMIC_SHARED(double, sums);
    // Every thread decides alike: a few numbers, and no exchange.
    int accepted = 0;
    while (accepted < drafts) {
        u32 d = window[accepted + 1];
        bool known = d < (u32)vocab;
        double mass = known ? p[(u64)accepted * vocab + d] : 0.0;
        double chance = !q ? 1.0 : known ? sp_sane(q[(u64)accepted * vocab + d]) : 0.0;
        if (!(chance > 0.0 && uniforms[accepted] * chance < mass)) break;
        accepted++;
    }
    const double* row = p + (u64)accepted * vocab;
    const double* drawn = q ? q + (u64)accepted * vocab : 0;
    const bool rejected = accepted < drafts;
    const int draft = rejected ? (int)window[accepted + 1] : -1;
    auto mass = [=](int i) {
        double v = row[i];
        if (rejected) {
            v -= drawn ? sp_sane(drawn[i]) : i == draft ? 1.0 : 0.0;
            if (!(v > 0.0)) v = 0.0;
        }
        return v;
    };
    int next = sp_inverse_cdf(mass, vocab, uniforms[drafts], sums);
    if (threadIdx.x == 0) sp_verdict(window, drafts, accepted, next, verdict);
}

extern "C" __global__ void __launch_bounds__(32)
advance(int* base, u32* window, const int* verdict) {
    if (threadIdx.x != 0) return;
    base[0] += verdict[2];
    window[0] = (u32)verdict[1];
}
