"""Excerpts of what UCX 1.23.0 logs, as the doctor reads them."""

CMA = """\
[1795969144.218340] [vm:7252 :0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from x)
[1795969144.235872] [vm:7252 :0]      ucp_worker.c:1997 UCX  INFO    n0 self cfg#0 \
rma_am(tcp/lo)  amo_am(tcp/lo)  am(posix/memory cma/memory)  ka(tcp/lo)
[1795969144.236906] [vm:7252 :0]   +--------+-------------+-----------------------------------+
[1795969144.236906] [vm:7252 :0]   | n0 self cfg#0                                            |
[1795969144.236906] [vm:7252 :0]   | remote memory write by ucp_put* from host memory to host |
[1795969144.236906] [vm:7252 :0]   +--------+-------------+-----------------------------------+
[1795969144.236906] [vm:7252 :0]   | Range  | Description |              Config               |
[1795969144.236906] [vm:7252 :0]   +--------+-------------+-----------------------------------+
[1795969144.236906] [vm:7252 :0]   | 0..inf | zero-copy   | self/memory                       |
[1795969144.236906] [vm:7252 :0]   +--------+-------------+-----------------------------------+
[1795969144.269884] [vm:7252 :0]      ucp_worker.c:1997 UCX  INFO    n0 intra-node cfg#1 \
rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)
[1795969144.270795] [vm:7252 :0]   +--------+-------------+-----------------------------------+
[1795969144.270795] [vm:7252 :0]   | n0 intra-node cfg#1                                      |
[1795969144.270795] [vm:7252 :0]   | remote memory write by ucp_put* from host memory to host |
[1795969144.270795] [vm:7252 :0]   +--------+-------------+-----------------------------------+
[1795969144.270795] [vm:7252 :0]   | Range  | Description |              Config               |
[1795969144.270795] [vm:7252 :0]   +--------+-------------+-----------------------------------+
[1795969144.270795] [vm:7252 :0]   | 0..inf | zero-copy   | cma/memory                        |
[1795969144.270795] [vm:7252 :0]   +--------+-------------+-----------------------------------+
[1795969144.271838] [vm:7252 :0]   +-------------+----------------------+------------+
[1795969144.271838] [vm:7252 :0]   | n0 intra-node cfg#1                             |
[1795969144.271838] [vm:7252 :0]   | active message by ucp_am_send* from host memory |
[1795969144.271838] [vm:7252 :0]   +-------------+----------------------+------------+
[1795969144.271838] [vm:7252 :0]   |    Range    |     Description      |   Config   |
[1795969144.271838] [vm:7252 :0]   +-------------+----------------------+------------+
[1795969144.271838] [vm:7252 :0]   |           0 | short                | tcp/lo     |
[1795969144.271838] [vm:7252 :0]   | 262137..inf | multi-frag zero-copy | tcp/lo     |
[1795969144.271838] [vm:7252 :0]   +-------------+----------------------+------------+
[1795969144.287391] [vm:7252 :0]   +--------+-------------+-------------------------------------+
[1795969144.287391] [vm:7252 :0]   | n0 intra-node cfg#1                                        |
[1795969144.287391] [vm:7252 :0]   | remote memory read by ucp_get*(multi) into host memory   |
[1795969144.287391] [vm:7252 :0]   +--------+-------------+-------------------------------------+
[1795969144.287391] [vm:7252 :0]   | Range  | Description |               Config                |
[1795969144.287391] [vm:7252 :0]   +--------+-------------+-------------------------------------+
[1795969144.287391] [vm:7252 :0]   | 0..inf | zero-copy   | cma/memory                          |
[1795969144.287391] [vm:7252 :0]   +--------+-------------+-------------------------------------+
"""

STRIPED_TCP = """\
[1795969598.106092] [vm:14253:0]      ucp_worker.c:1997 UCX  INFO    n0 intra-node cfg#1 \
rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo tcp/eth0)  ka(tcp/lo)
[1795969598.107216] [vm:14253:0]   | n0 intra-node cfg#1                                      |
[1795969598.107216] [vm:14253:0]   | remote memory write by ucp_put* from host memory to host |
[1795969598.107216] [vm:14253:0]   | Range  | Description |              Config               |
[1795969598.107216] [vm:14253:0]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
[1795969598.107216] [vm:14253:0]   | n0 intra-node cfg#1                                      |
[1795969598.107216] [vm:14253:0]   | remote memory read by ucp_get* into host memory from host |
[1795969598.107216] [vm:14253:0]   | Range  |    Description     |           Config           |
[1795969598.107216] [vm:14253:0]   | 0..inf | software emulation | tcp/lo                     |
"""

DEVICES = """\
[1795969155.739620] [vm:7308 :0] ucp_worker.c:1521 UCX  DEBUG created interface[0]=0x55ee537707e0 \
using self/memory on worker 0x55ee5376ffc0
[1795969155.740146] [vm:7308 :0] ucp_worker.c:1521 UCX  DEBUG created interface[1]=0x55ee53790460 \
using rc_mlx5/mlx5_0:1 on worker 0x55ee5376ffc0
[1795969155.740146] [vm:7308 :0] ucp_worker.c:1521 UCX  DEBUG created interface[0]=0x55ee53790461 \
using self/memory on worker 0x55ee5376ffd0
"""

COMPLAINTS = """\
[1795969182.266808] [vm:7591 :0] ucp_context.c:1508 UCX  WARN  transport 'bogus' is not available
[1795969182.266808] [vm:7591 :0] ucp_context.c:1508 UCX  WARN  transport 'bogus' is not available
[1795969184.135223] [vm:7609 :0] parser.c:2578 UCX  WARN  unused environment variables: \
UCX_TCP_SNDBUF (maybe: UCX_TCP_CM_SNDBUF?); UCX_TYPO
[1795969184.135223] [vm:7609 :0] parser.c:2578 UCX  WARN  (set UCX_WARN_UNUSED_ENV_VARS=n to x)
[1795969182.266828] [vm:7591 :0] ucp_context.c:1770 UCX  ERROR no usable transports/devices
"""
