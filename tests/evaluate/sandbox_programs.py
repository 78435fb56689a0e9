"""Honest programs with their tests: what the two processes of a sandbox have to pass on."""

HONEST = {
    "modules of the library": (
        """
import json, itertools, datetime
x = json.loads('[1]')
""",
        """
assert x == [1]
assert json.dumps(x) == '[1]'
""",
    ),
    "arguments": (
        """
def f(*a, k=1): return a, k
""",
        """
assert f(1, [2], k={'a': (3,)}) == ((1, [2]), {'a': (3,)})
""",
    ),
    "plain values": (
        """
def f(x): return x
""",
        """
for x in (None, 2**9000, -0.5, float('inf'), 1j, b'\\0', {1}, frozenset(), range(3), 'ü\\ud800'):
    assert f(x) == x and type(f(x)) is type(x)
""",
    ),
    "numbers of the library": (
        """
from fractions import *
from decimal import *
def f(n): return Fraction(n, 3), Decimal(n) / 8
""",
        """
from fractions import Fraction as F
assert f(5) == (F(5, 3), 0.625)
""",
    ),
    "dates": (
        """
from datetime import *
def f(d): return d + timedelta(days=1)
""",
        """
import datetime
assert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)
""",
    ),
    "collections": (
        """
from collections import *
def f(t): return Counter(t), defaultdict(list, a=[1]), deque(t)
""",
        """
from collections import deque
assert f('aab') == ({'a': 2, 'b': 1}, {'a': [1]}, deque('aab'))
""",
    ),
    "named tuples": (
        """
from collections import namedtuple
P = namedtuple('P', 'x y')
def f(): return P(1, 2)
""",
        """
assert f() == (1, 2) and f().x == 1 and f() == P(1, 2) != P(2, 1)
""",
    ),
    "numbers with names": (
        """
import enum
class E(enum.IntEnum): A = 3
def f(): return E.A
""",
        """
assert f() == 3 and f() + 1 == 4 and f() < 4
""",
    ),
    "a list in place": (
        """
def f(rows): rows.sort(); rows[0][0] = 9
""",
        """
rows = [[2], [1]]
first = rows[1]
f(rows)
assert rows == [[9], [2]]
""",
    ),
    "containers in place": (
        """
def f(d, s, l): d['n']['x'] = 1; s.add(2); l.clear()
""",
        """
d, s, l = {'n': {}}, {1}, [1]
inner = d['n']
f(d, s, l)
assert (d, s, l) == ({'n': {'x': 1}}, {1, 2}, [])
assert inner == {'x': 1}
""",
    ),
    "functions of the tests": (
        """
def f(g, xs): return [g(x) for x in xs]
""",
        """
seen = []
assert f(lambda x: seen.append(x) or x + 1, [1, 2]) == [2, 3] and seen == [1, 2]
assert f(str, [1]) == ['1']
assert f(len, ['ab']) == [2]
assert f(str.upper, ['a']) == ['A']
""",
    ),
    "generators": (
        """
def f(n):
    while True:
        yield n
        n += 1
""",
        """
import itertools
assert list(itertools.islice(f(3), 3)) == [3, 4, 5]
g = f(0)
assert next(g) == 0 and next(g) == 1
""",
    ),
    "iterators of the tests": (
        """
def f(xs): return sum(xs)
""",
        """
assert f(x * x for x in range(4)) == 14
""",
    ),
    "operators": (
        """
class V:
    def __init__(s, x): s.x = x
    def __add__(s, o): return V(s.x + o.x)
    def __mul__(s, k): return V(s.x * k)
    __rmul__ = __mul__
    def __eq__(s, o): return s.x == o.x
    def __repr__(s): return f'V({s.x})'
    def __len__(s): return s.x
    def __getitem__(s, i): return [s.x][i]
""",
        """
v = V(1) + V(2)
assert v == V(3) and v != V(4) and repr(v) == 'V(3)'
assert len(v) == 3 and v[0] == 3 and [*v] == [3]
assert 2 * v == v * 2 == V(6)
v.x = 5
assert v.x == 5 and isinstance(v, V) and not isinstance(3, V)
""",
    ),
    "a subclass of list": (
        """
class S(list):
    def peek(s): return s[-1]
""",
        """
s = S()
s.append(4)
s.append(5)
assert s.peek() == 5 and s == [4, 5] and s.pop() == 5 and len(s) == 1
""",
    ),
    "context managers": (
        """
class C:
    n = 0
    def __enter__(s): C.n += 1; return s
    def __exit__(s, *a): C.n -= 1
    @property
    def twice(s): return C.n * 2
    def __contains__(s, x): return x == 1
    def __bool__(s): return False
""",
        """
with C() as c: assert c.twice == 2 and C.n == 1
assert C.n == 0 and 1 in c and 2 not in c and not c
""",
    ),
    "exceptions": (
        """
def f(x):
    if x < 0: raise ValueError('negative', x)
    return {}[x]
""",
        """
try: f(-1)
except ValueError as e: assert e.args == ('negative', -1)
else: assert False
try: f(1)
except KeyError: pass
else: assert False
""",
    ),
    "exceptions of the program": (
        """
class Full(RuntimeError):
    def __init__(s, n): super().__init__(f'{n} in it'); s.n = n
def f(): raise Full(3)
""",
        """
try: f()
except Full as e: assert e.n == 3 and isinstance(e, RuntimeError)
else: assert False
""",
    ),
    "exceptions of the library": (
        """
import json
def f(t): return json.loads(t)
""",
        """
import json, unittest
unittest.TestCase().assertRaises(json.JSONDecodeError, f, '{')
""",
    ),
    "printed output": (
        """
def f(): print('a', 1)
""",
        """
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as out: f()
assert out.getvalue() == 'a 1\\n'
""",
    ),
    "objects of the tests": (
        """
def f(node): node.next.value += 1; return node.next.double()
""",
        """
class Node:
    def __init__(s, value, next=None): s.value, s.next = value, next
    def double(s): return s.value * 2
n = Node(1, Node(2))
assert f(n) == 6 and n.next.value == 3
""",
    ),
    "the same object": (
        """
import enum
class Colour(enum.Enum):
    RED = 1
class One:
    only = None
    def __new__(cls):
        cls.only = cls.only or super().__new__(cls)
        return cls.only
def f(): return Colour.RED
""",
        """
assert f() is Colour.RED is Colour(1) and f() == Colour.RED
assert One() is One() and One is not Colour and object() is not One()
""",
    ),
    "data classes": (
        """
from dataclasses import dataclass
@dataclass(order=True)
class P:
    x: int
    y: int = 0
""",
        """
assert P(1) < P(2) and sorted([P(2), P(1)]) == [P(1), P(2)] and P(1) == P(1, 0) and {P: 1}
""",
    ),
    "caches": (
        """
import functools
@functools.lru_cache
def f(n): return n if n < 2 else f(n - 1) + f(n - 2)
""",
        """
assert f(50) == 12586269025
""",
    ),
    "threads and coroutines": (
        """
import asyncio, threading
async def g(): return 1
def f():
    t = threading.Thread(target=print)
    t.start()
    t.join()
    return asyncio.run(g())
""",
        """
assert f() == 1
""",
    ),
    "temporary files": (
        """
import tempfile
def f():
    with tempfile.NamedTemporaryFile('w+') as file:
        file.write('a')
        file.seek(0)
        return file.read()
""",
        """
assert f() == 'a'
""",
    ),
}
