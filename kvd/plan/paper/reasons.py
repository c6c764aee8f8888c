"""Notes on where and why the plan differs from the paper, figure by figure. Pure text.

A note is a paragraph; names in braces are replaced by numbers of the replays. Statements about the
paper are in its text. Statements about the plan hold for the full sample; a quick one may differ.
"""

SUMMARY = """\
The best of the four models each, as in the paper's abstract; why they differ is said below.
"""

HIT_RATES = """\
No cache can hit more than {ceiling:.1f} % here: the other measured turns are first ones. Falcon's
90 % is above that: of the paper's sample fewer sessions can have begun after the warm-up.

The agreement needs all of: an overloaded server (one session a second is several times what it can
compute, and thousands of jobs wait), a full window charged for each session, and a policy that
ranks the whole queue. With L_ew to the letter, the sessions beyond the window go by age, and the
oldest are those needed soonest.

The preprint's sessions are others (3.51 turns, 72 % above 4K tokens) and are not replayed.
"""

TTFTS = """\
Better than the paper where the cache hits: here a prefill costs 20 ms and 0.5 ms a token, and
loads hide behind it as far as PCIe allows; what the paper's engine spends besides is not in its
text.

LLaMA-65B wants {needed_gb:.1f} GB of sessions a second from SSD, which an SSD of 5 GB/s just has
on average and not at peaks: {waiting:.0f} % of the hits wait for the disk, which is worse than
computing. An SSD of 10 GB/s, or a guard that computes what is slower to load, makes the
difference.

All models run with LLaMA-13B's engine. The one time of another that the paper gives, 360 ms for 2K
tokens of LLaMA-65B on four GPUs (§2.4), is a third of that.
"""

PREFILL_THROUGHPUT = """\
As Figure 14: a hit costs 20 ms, its new tokens, and what PCIe at 25 GB/s leaves uncovered. The
paper's factors are what turns that take 0.05 to 0.1 s more would give.
"""

GPU_TIME = """\
CA's hours agree (Figure 25), RE's do not: 4.0 times 6.5 hours are 26, of which 42K prefills of the
paper's own 1 s (0.15 s is 85 % less than that) are 12. The rest is more than twice CA's decoding.

So it is if a decode that waits for a prefill counts as decoding while the prefill counts, too: the
second set of rows, close to the paper's with LLaMA-13B and 65B. The other two are replayed with
LLaMA-13B's times, which need not be theirs.
"""

COSTS = """\
Nothing of its own: savings follow from Figure 16's GPU times and the paper's prices ($5 an hour
and GPU, $0.0088 a GB of DRAM, $0.000082 a GB of SSD), and differ as those times do. Storage's
share is the paper's: it depends on no time.
"""

POLICIES = """\
CA and LRU agree if each session is charged a full window. Packed, as kvd stores them, 10 TB hold
every session: LRU finds what CA finds, and there is nothing to win.

2 TB need the whole queue: the formula's window covers a quarter of it, and of the jobs behind it
LRU drops those that are needed soonest.

FIFO is not below LRU here: while all live sessions wait they come back in turn, and both drop them
in that order. Why the paper's FIFO loses up to 10 points its text does not say.

GPU time differs as in Figure 16.
"""

OVERFLOW = """\
The models with 4K agree if a truncation costs one turn its hit, and what that turn computes can be
reused until the next one. LLaMA-65B loses less than in the paper, perhaps by the lengths: those
drawn are fitted to the shares of sessions above 2K and 4K tokens only.

If a session never hit again after its first overflow it would lose what the last rows say: more
than in the paper, closer to the preprint.
"""

CAPACITY = """\
The knee belongs to a server that keeps up. At one session a second this one does not: sessions
stay in its queue for hours, more of them than begin in an hour. With an engine three times as
fast, and users who answer at once, both points come near.

If users think, sessions stay longer again, and a quarter of CCpUT is too little. The text tells
neither the load nor the think times of this experiment.
"""

MEDIA = """\
HBM is replayed as a tier of its size. Above the paper throughout without SSD: no buffer is kept
free, and of the queue all is known, so that the few sessions there is room for are those whose
turns come next.
"""

RATES = """\
The paper's 82 to 77 % leave out its own 86 % at one a second (Figure 13). GPU time and its growth
agree; TTFT is shorter, as in Figure 14.

At 0.5 a second everything hits that can: more sessions begin after the warm-up, and first turns
count as misses.

From one a second on the rate hardly matters here: the server is overloaded either way, and almost
all sessions are in its queue at once. The paper's hit rate falls further.

The paper's prefill throughput does not fit its TTFT: 2K tokens in 0.122 s are 17K a second, about
what is planned here. What its 858K count is not said.
"""

LONG_PREFILLS = """\
RE's TTFT sets the engine's speed and agrees by construction; CA's follows from it.

CA's turn is bound by PCIe, not by computing: the document's KV takes {load_s:.3f} s at the paper's
own 26 GB/s (§2.4), more than its 0.12 s. The rest must be loaded before the turn begins, into the
read buffer, which is not replayed.
"""

LONG_OVERALL = """\
RE's share sets the time of a decode step and agrees by construction.

CA's 1.2 % are 0.04 s, a third of its own TTFT: it seems to leave out the wait for the load.
"""
